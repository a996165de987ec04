"""The parts of a speed-up: one thing switched off after another, and together the whole."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import KEEP_MEMORY, Alignment, Distributed, LossScale, Recipe
from autoprec.core.recipe_words import describe_recipe
from autoprec.core.speed.attribution import (
    attribute_speedup,
    baseline_at_batch_of,
    switch_off_in_turn,
)
from autoprec.core.speed.noise import paired_ratio

PLAIN = Recipe(batch_size=32)
recipes = st.builds(
    Recipe,
    policy=st.sampled_from(Policy),
    batch_size=st.sampled_from([8, 32, 64]),
    compile=st.booleans(),
    memory_format=st.sampled_from(["contiguous", "channels_last"]),
    knobs=st.sampled_from([{}, {KEEP_MEMORY: True}, {"threads": 2, KEEP_MEMORY: True}]),
)
FULL = Recipe(
    policy=Policy.MIXED_FLOAT16,
    batch_size=16,
    accumulation_steps=4,
    float32_modules=("head",),
    loss_scale=LossScale(),
    alignment=Alignment(8, ("body",)),
    memory_format="channels_last",
    compile=True,
    knobs={"threads": 2, "fused_optimizer": True, KEEP_MEMORY: True},
)


def test_what_float8_brings_stands_beside_what_its_policy_brings() -> None:
    refined = Recipe(Policy.MIXED_BFLOAT16, 32, compile=True, knobs={"float8": True, "threads": 2})
    names = [step.what for step in switch_off_in_turn(refined, PLAIN)]
    assert names == ["float8", "precision", "threads=2", "compiled"]


@given(recipes)
def test_it_ends_at_the_baseline_and_no_step_changes_nothing(recipe: Recipe) -> None:
    steps = switch_off_in_turn(recipe, PLAIN)
    keys = [recipe.key(), *(step.recipe.key() for step in steps)]
    assert keys[-1] == PLAIN.key()
    assert len(set(keys)) == len(keys)
    assert all(step.what for step in steps)


@given(recipes, st.randoms(use_true_random=False), st.booleans())
def test_the_parts_multiply_to_the_whole(recipe: Recipe, random, some_missing: bool) -> None:
    """In rounds without noise; with it, as near as medians do."""
    everybody = [recipe, *(step.recipe for step in switch_off_in_turn(recipe, PLAIN))]
    ran = [r for r in everybody[1:-1] if not (some_missing and random.random() < 0.5)]
    rates = {r.key(): (random.uniform(1, 9),) * 6 for r in (recipe, *ran, PLAIN)}
    found = attribute_speedup(recipe, PLAIN, rates)
    whole = paired_ratio(rates[recipe.key()], rates[PLAIN.key()]).ratio
    assert math.prod(part.speedup.ratio for part in found) == pytest.approx(whole)


def test_every_setting_is_named_where_it_is_switched_off() -> None:
    steps = [(step.what, describe_recipe(step.recipe)) for step in switch_off_in_turn(FULL, PLAIN)]
    large, base = (
        "float32, batch 64 in 4 micro-batches of 16",
        "channels_last, compiled, padded to 8",
    )
    assert steps == [
        ("precision", f"{large}, {base}, threads=2, fused_optimizer, memory kept"),
        ("threads=2", f"{large}, {base}, fused_optimizer, memory kept"),
        ("fused_optimizer", f"{large}, {base}, memory kept"),
        ("padded to 8", f"{large}, channels_last, compiled, memory kept"),
        ("compiled", f"{large}, channels_last, memory kept"),
        ("channels_last", f"{large}, memory kept"),
        ("batch", "float32, batch 32, memory kept"),
        ("kept memory", "float32, batch 32"),
    ]


def test_float32_at_its_own_batch_keeps_memory_as_the_recipe_does() -> None:
    kept = "float32, batch 64 in 4 micro-batches of 16, memory kept"
    assert describe_recipe(baseline_at_batch_of(FULL, PLAIN)) == kept
    assert baseline_at_batch_of(Recipe(compile=True), PLAIN) == Recipe()


def test_a_reduction_is_a_part_of_its_own() -> None:
    plain = Recipe(batch_size=32, distributed=Distributed("fsdp2", 2))
    ranks = Distributed("fsdp2", 2, DType.BFLOAT16, DType.BFLOAT16, reshard_after_forward=False)
    recipe = Recipe(Policy.MIXED_BFLOAT16, 64, distributed=ranks, knobs={"fused_optimizer": True})
    travels = "reduce_dtype=bfloat16, reshard_after_forward=False"
    assert describe_recipe(recipe) == (
        f"mixed_bfloat16, batch 128 on 2 ranks, {travels}, fused_optimizer"
    )
    steps = [(s.what, describe_recipe(s.recipe)) for s in switch_off_in_turn(recipe, plain)]
    assert steps == [
        ("precision", f"float32, batch 128 on 2 ranks, {travels}, fused_optimizer"),
        ("reduction", "float32, batch 128 on 2 ranks, fused_optimizer"),
        ("fused_optimizer", "float32, batch 128 on 2 ranks"),
        ("batch", "float32, batch 64 on 2 ranks"),
    ]
    (first, *_) = switch_off_in_turn(recipe, plain)
    assert first.recipe.distributed is not None
    assert first.recipe.distributed.param_dtype is None
