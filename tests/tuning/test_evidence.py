"""What a profile and its notes say of what was measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autoprec.core.measurement import Dimension, Measurement, TaskFacts
from autoprec.core.outcomes import Outcome, Status
from autoprec.core.recipe import Alignment, Recipe
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


@pytest.mark.parametrize(
    ("alignment", "padded_to"),
    [(Alignment(), 56), (Alignment(8, ("head",)), 56), (Alignment(64, ("head",)), 64)],
)
def test_a_profile_says_to_what_size_its_own_recipe_pads(
    alignment: Alignment, padded_to: int
) -> None:
    task = TaskFacts(
        "torch", {}, 32, 32, 1000, dimensions=(Dimension("head", "Linear", "out_features", 50),)
    )
    findings = Findings(SimpleNamespace(), task, (), space=None, alignment=8)
    (row,) = evidence._padding(findings, Recipe(alignment=alignment))
    assert row["padded_to"] == padded_to
