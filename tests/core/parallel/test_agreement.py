"""Ranks whose recipes do not go together are all told the same, with who has what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.dtypes import DType, Policy
from autoprec.core.parallel.agreement import RankRecipe, disagreement
from autoprec.core.recipe import Distributed, LossScale, Recipe
from tests.fuzz.values import recipes

BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16)
FLOAT16 = Recipe(Policy.MIXED_FLOAT16)


def on_ranks(*found: Recipe) -> list[RankRecipe]:
    return [RankRecipe(f"device {rank}", recipe) for rank, recipe in enumerate(found)]


@given(recipes, st.integers(1, 4))
def test_equal_recipes_agree(recipe, count):
    assert disagreement(on_ranks(*[recipe] * count)) == ""


def test_what_is_a_matter_of_each_device_may_differ():
    own = replace(BFLOAT16, compile=True, batch_size=8, float32_modules=("a",))
    assert disagreement(on_ranks(BFLOAT16, own)) == ""
    ranks = replace(BFLOAT16, distributed=Distributed(bucket_mb=100))
    assert disagreement(on_ranks(BFLOAT16, ranks)) == ""


def test_the_table_shows_every_rank_and_only_what_differs():
    text = disagreement(on_ranks(BFLOAT16, FLOAT16, BFLOAT16))
    assert text.splitlines()[0].startswith("the ranks' profiles differ in policy and loss scale,")
    assert text.splitlines()[1:] == [
        "  rank  device    policy          loss scale",
        "  0     device 0  mixed_bfloat16  none",
        "  1     device 1  mixed_float16   dynamic 65536 (growth 2000, floor 1)",
        "  2     device 2  mixed_bfloat16  none",
    ]


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (replace(FLOAT16, loss_scale=LossScale("fixed", 8.0)), "loss scale"),
        (replace(FLOAT16, loss_scale=LossScale(growth_interval=10)), "loss scale"),
        (replace(FLOAT16, accumulation_steps=2), "accumulation steps"),
        (replace(FLOAT16, distributed=Distributed(reduce_dtype=DType.BFLOAT16)), "reduce dtype"),
    ],
)
def test_each_of_them_is_named(other, names):
    assert f"differ in {names}," in disagreement(on_ranks(FLOAT16, other))


def test_a_loss_scale_that_was_not_tuned_is_the_default():
    assert disagreement(on_ranks(FLOAT16, replace(FLOAT16, loss_scale=LossScale()))) == ""
