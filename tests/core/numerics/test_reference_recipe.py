"""Which recipes compute what plain float32 computes."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.numerics.reference_recipe import is_reference
from autoprec.core.recipe import KEEP_MEMORY, Alignment, Recipe


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({}, True),
        ({"batch_size": 512, "accumulation_steps": 4}, True),
        ({"memory_format": "channels_last"}, True),
        ({"knobs": {"fused_optimizer": True, "threads": 2, KEEP_MEMORY: True}}, True),
        ({"knobs": {"implicit_bfloat16": False}}, True),
        ({"knobs": {"implicit_bfloat16": True}}, False),
        ({"compile": True}, False),
        ({"alignment": Alignment(8, ("head",))}, False),
        ({"alignment": Alignment(8)}, True),
        ({"policy": Policy.TF32}, False),
        ({"policy": Policy.MIXED_BFLOAT16}, False),
        ({"policy": Policy.MIXED_BFLOAT16, "float32_modules": ("",)}, False),
    ],
)
def test_the_reference_is_float32_with_its_arithmetic_unchanged(
    settings: dict[str, Any], reference: bool
) -> None:
    assert is_reference(Recipe(**settings)) is reference
