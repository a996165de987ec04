"""What must hold of recipes in words: equal recipes read alike, other ones do not."""

from __future__ import annotations

import pytest

from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import Alignment, Distributed, KnobValue, Recipe
from autoprec.core.recipe_words import (
    describe_batch,
    describe_point,
    describe_recipe,
    describe_setting,
    describe_settings,
    name_recipe,
)
from autoprec.core.speed.space import Space

FULL = Recipe(
    policy=Policy.MIXED_BFLOAT16,
    batch_size=16,
    accumulation_steps=4,
    memory_format="channels_last",
    compile=True,
    alignment=Alignment(8, ("head",)),
    knobs={"keep_memory": True, "threads": 2, "cudnn_benchmark": False},
    float32_modules=("a", "", "c", "d", "e"),
)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((32, 1), "batch 32"),
        ((8, 4), "batch 32 in 4 micro-batches of 8"),
        ((16, 1, 2), "batch 32 on 2 ranks"),
        ((8, 2, 2), "batch 32 on 2 ranks in 2 micro-batches of 8 each"),
    ],
)
def test_a_batch_is_described_whole_and_in_its_parts(numbers: tuple[int, ...], text: str) -> None:
    assert describe_batch(*numbers) == text


def test_a_recipe_is_described_completely_and_named_in_short() -> None:
    batch = "batch 64 in 4 micro-batches of 16"
    settings = "channels_last, compiled, padded to 8, threads=2, cudnn_benchmark=False, memory kept"
    modules = "a, the root, c and 2 more in float32"
    assert describe_recipe(FULL) == f"mixed_bfloat16, {batch}, {settings}, {modules}"
    assert describe_settings(FULL.settings) == settings
    assert name_recipe(FULL) == f"mixed_bfloat16 at {batch}"
    assert describe_recipe(Recipe()) == "float32, batch 32"
    assert describe_settings(Recipe().settings) == ""


def test_a_point_of_the_search_reads_as_the_recipe_it_stands_for() -> None:
    space = Space(
        policies=(Policy.FLOAT32,),
        batch_sizes=(32,),
        memory_formats=("contiguous", "channels_last"),
        compile=(False, True),
        knobs={"fused_optimizer": (False, True), "keep_memory": (False, True)},
        alignments=(Alignment(), Alignment(8, ("head",))),
        distributed=Distributed("fsdp2", 2),
        rank_levels={
            "reduce_dtype": ("float32", "bfloat16"),
            "reshard_after_forward": (True, False),
        },
    )
    said = [describe_point(point) for point in space.points()]
    assert said == [describe_settings(space.recipe(point).settings) for point in space.points()]
    assert len(set(said)) == len(said) == 128


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("policy", "float32", ""),
        ("batch_size", 32, ""),
        ("compile", False, ""),
        ("memory_format", "contiguous", ""),
        ("alignment", 1, ""),
        ("bucket_mb", 25, ""),
        ("bucket_mb", 100, "bucket_mb=100"),
        ("reduce_dtype", DType.BFLOAT16.value, "reduce_dtype=bfloat16"),
        ("keep_memory", False, "keep_memory=False"),
    ],
)
def test_a_setting_at_its_default_is_not_described(name: str, value: KnobValue, text: str) -> None:
    assert describe_setting(name, value) == text
