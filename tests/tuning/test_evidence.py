"""What a profile and its notes say of what was measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.outcomes import Outcome, Status
from autoprec.tuning import evidence
from autoprec.tuning.evidence import Findings

PLAIN = {"policy": "float32", "alignment": 1}


@pytest.mark.parametrize(
    ("tried", "said"),
    [
        ([{**PLAIN}], "was not worth a trial"),
        ([{**PLAIN}, {**PLAIN, "alignment": 8}], "was measured at 2.00x and not chosen"),
        ([{**PLAIN}, {"policy": "mixed_bfloat16", "alignment": 8}], "was tried and not chosen"),
    ],
)
def test_what_is_said_of_padding_is_what_was_tried(
    tried: list[dict[str, object]], said: str
) -> None:
    history = [
        Outcome(point, Status.OK, Measurement(step, step, step, 5, 32, peak_memory_bytes=1))
        for point, step in zip(tried, (1.0, 0.5), strict=False)
    ]
    facts = SimpleNamespace(observation=SimpleNamespace(rehearsal=False))
    task = TaskFacts("torch", {}, 32, 32, 1000)
    findings = Findings(facts, task, tuple(history), space=None)
    assert evidence._padding_seen(findings) == said
