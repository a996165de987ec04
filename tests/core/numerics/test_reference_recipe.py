"""Which recipes compute what plain float32 computes."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.core.dtypes import DType, Policy
from autoprec.core.numerics.reference_recipe import (
    is_reference,
    keeps_arithmetic,
    rounds_everywhere,
)
from autoprec.core.recipe import KEEP_MEMORY, Alignment, Distributed, Recipe


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
        ({"distributed": Distributed("ddp", 2, bucket_mb=100)}, True),
        ({"distributed": Distributed("fsdp2", 2, reshard_after_forward=False)}, True),
        ({"distributed": Distributed("ddp", 2, reduce_dtype=DType.BFLOAT16)}, False),
        ({"distributed": Distributed("fsdp2", 2, param_dtype=DType.BFLOAT16)}, False),
        ({"policy": Policy.MIXED_BFLOAT16}, False),
        ({"policy": Policy.MIXED_BFLOAT16, "float32_modules": ("",)}, False),
    ],
)
def test_the_reference_is_float32_with_its_arithmetic_unchanged(
    settings: dict[str, Any], reference: bool
) -> None:
    assert is_reference(Recipe(**settings)) is reference


def test_what_is_rounded_between_ranks_is_rounded_in_islands_too() -> None:
    exact = Recipe(Policy.MIXED_BFLOAT16, distributed=Distributed("fsdp2", 2, DType.BFLOAT16))
    rounded = Recipe(distributed=Distributed("ddp", 2, reduce_dtype=DType.FLOAT16))
    assert keeps_arithmetic(exact)
    assert not rounds_everywhere(exact)
    assert not keeps_arithmetic(rounded)
    assert rounds_everywhere(rounded)
    assert rounds_everywhere(Recipe(knobs={"implicit_bfloat16": True}))
