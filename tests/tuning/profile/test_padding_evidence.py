"""What a profile says of dimensions that are off the alignment."""

from __future__ import annotations

import pytest
from factories import steady

from autoprec.core.measurement import Dimension, TaskFacts
from autoprec.core.recipe import Alignment, Recipe
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.profile.padding_evidence import describe_padding_trials, padding_evidence
from tests.tuning.fake_results import result_of

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
        Outcome(point, Status.OK, steady(step, peak_memory_bytes=1))
        for point, step in zip(tried, (1.0, 0.5), strict=False)
    ]
    assert describe_padding_trials(result_of(history)) == said


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
    result = result_of((), task=task, alignment=8)
    (row,) = padding_evidence(result, Recipe(alignment=alignment))
    assert row.padded_to == padded_to
