"""Which recipes compute what plain float32 computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoprec.core.dtypes import DType, Policy
from autoprec.core.numerics.reference_recipe import (
    is_exact,
    is_reference,
    keeps_arithmetic,
    plain_float32,
    rounds_everywhere,
    settings_in_float32,
    settings_of,
)
from autoprec.core.recipe import KEEP_MEMORY, Alignment, Distributed, LossScale, Recipe

LAID_OUT = "channels_last"


@pytest.mark.parametrize(
    ("given", "exact", "names"),
    [
        ({}, True, ""),
        ({"batch_size": 512}, True, ""),
        ({"batch_size": 8, "accumulation_steps": 4}, True, "4 micro-batches of 8"),
        ({"memory_format": "channels_last"}, True, "channels_last"),
        ({"knobs": {KEEP_MEMORY: True, "steps_per_execution": 8}}, True, ""),
        ({"knobs": {"fused_optimizer": False}}, True, ""),
        (
            {"knobs": {"fused_optimizer": True, "threads": 2, KEEP_MEMORY: True}},
            True,
            "fused_optimizer, threads=2",
        ),
        ({"knobs": {"cudnn_benchmark": True}}, True, "cudnn_benchmark"),
        ({"knobs": {"implicit_bfloat16": False}}, True, ""),
        ({"knobs": {"implicit_bfloat16": True}}, False, ""),
        ({"compile": True, "knobs": {"compile_mode": "default"}}, False, "compiled"),
        ({"knobs": {"compile_mode": "default"}}, True, ""),
        ({"alignment": Alignment(8, ("head",))}, False, "padded to 8"),
        ({"alignment": Alignment(8)}, True, ""),
        ({"policy": Policy.TF32}, False, ""),
        ({"distributed": Distributed("ddp", 2, bucket_mb=100)}, True, ""),
        ({"distributed": Distributed("fsdp2", 2, reshard_after_forward=False)}, True, ""),
        ({"distributed": Distributed("ddp", 2, reduce_dtype=DType.BFLOAT16)}, False, ""),
        ({"distributed": Distributed("fsdp2", 2, param_dtype=DType.BFLOAT16)}, False, ""),
        ({"policy": Policy.MIXED_BFLOAT16}, False, ""),
        ({"policy": Policy.MIXED_BFLOAT16, "memory_format": "channels_last"}, False, LAID_OUT),
        ({"policy": Policy.MIXED_BFLOAT16, "float32_modules": ("",)}, False, ""),
    ],
)
def test_the_reference_is_plain_float32_and_float32_with_settings_is_exact(
    given: dict[str, Any], exact: bool, names: str
) -> None:
    recipe = Recipe(**given)
    assert is_exact(recipe) is exact
    assert is_reference(recipe) is (exact and not names)
    assert ", ".join(setting.name for setting in settings_of(recipe)) == names


def test_settings_are_compared_in_float32_with_nothing_that_rounds() -> None:
    recipe = Recipe(
        Policy.MIXED_FLOAT16,
        8,
        4,
        ("norm",),
        Alignment(8, ("head",)),
        LossScale(),
        "channels_last",
        True,
        {"compile_mode": "default", "implicit_bfloat16": True, KEEP_MEMORY: True, "threads": 2},
        forced=True,
        distributed=Distributed("fsdp2", 2, DType.BFLOAT16, DType.BFLOAT16),
    )
    ranks = Distributed("fsdp2", 2)
    compared = settings_in_float32(recipe)
    assert compared == Recipe(
        Policy.FLOAT32,
        8,
        4,
        alignment=recipe.alignment,
        memory_format="channels_last",
        compile=True,
        knobs={"compile_mode": "default", "threads": 2},
        distributed=ranks,
    )
    assert settings_in_float32(compared) == compared
    assert plain_float32(recipe) == Recipe(batch_size=32, distributed=ranks)
    plain = plain_float32(recipe)
    assert {setting.key: setting.alone for setting in settings_of(recipe)} == {
        "accumulation_steps": replace(plain, batch_size=8, accumulation_steps=4),
        "memory_format": replace(plain, memory_format="channels_last"),
        "compile": replace(plain, compile=True, knobs={"compile_mode": "default"}),
        "alignment": replace(plain, alignment=recipe.alignment),
        "threads": replace(plain, knobs={"threads": 2}),
    }


def test_what_is_rounded_between_ranks_is_rounded_in_islands_too() -> None:
    exact = Recipe(Policy.MIXED_BFLOAT16, distributed=Distributed("fsdp2", 2, DType.BFLOAT16))
    rounded = Recipe(distributed=Distributed("ddp", 2, reduce_dtype=DType.FLOAT16))
    assert keeps_arithmetic(exact)
    assert not rounds_everywhere(exact)
    assert not keeps_arithmetic(rounded)
    assert rounds_everywhere(rounded)
    assert rounds_everywhere(Recipe(knobs={"implicit_bfloat16": True}))
