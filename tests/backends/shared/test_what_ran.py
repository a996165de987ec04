"""What is said of a recipe's first update: nothing where all of it ran."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.backends.shared.what_ran import WhatRan
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe

RECIPE = Recipe(
    policy=Policy.MIXED_BFLOAT16,
    batch_size=8,
    accumulation_steps=2,
    memory_format="channels_last",
    float32_modules=("head",),
)
RIGHT = WhatRan(
    dtype="bfloat16", islands=("head",), memory_format="channels_last", batch=8, calls=2
)


def test_all_that_ran_is_one_line_and_no_problem() -> None:
    assert RIGHT.problems(RECIPE) == ()
    assert RIGHT.line(RECIPE) == (
        "after the first update: mixed_bfloat16; first product in bfloat16; islands that ran: "
        "head; padded modules that ran: none; memory format channels_last; batch 8 (checked with 8)"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 4}, "batches of 4 and the profile was checked with 8: give the loader batch_si"),
        ({"calls": 1}, "made of 1 micro-batches, and the profile accumulates 2 of 8"),
        ({"dtype": "float32"}, "ran in float32, and mixed_bfloat16 computes in bfloat16"),
        ({"inert": ("head",)}, "head did not run"),
        ({"inert": ("",)}, "the model itself did not run"),
        ({"rounded": ("head",)}, "head should have run in float32"),
        ({"memory_format": "contiguous"}, "is contiguous, and the profile lays images out"),
    ],
)
def test_what_had_no_effect_is_said(changes: dict[str, object], said: str) -> None:
    (found,) = replace(RIGHT, **changes).problems(RECIPE)  # type: ignore[arg-type]
    assert said in found


def test_what_was_not_seen_is_not_said() -> None:
    unseen = WhatRan()
    assert unseen.problems(RECIPE) == ()
    compiled = WhatRan(dtype="float32", inert=("head",), batch=8, compiled=True)
    assert compiled.problems(RECIPE) == ()
    assert "compiled, so that its modules are not seen" in compiled.line(RECIPE)
