"""What must hold of the search space: points and recipes say the same, batches divide."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from fuzz.values import knobs
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import Alignment, Distributed, LossScale, Recipe
from autoprec.core.speed.space import (
    BATCH,
    Space,
    micro_batches,
    parse_batch_sizes,
    point_key,
    powers_of_two,
)
from autoprec.errors import UsageError

LEVELS = {
    "threads": (8, 4, 2),
    "fused_optimizer": (False, True),
    "cudnn_benchmark": (False, True),
}


PADDINGS = (Alignment(), Alignment(8, ("body.0",)), Alignment(64, ("body.0", "head")))

RANKS = (
    {},
    {"distributed": Distributed("ddp", 2), "rank_levels": {"bucket_mb": (25, 100)}},
    {
        "distributed": Distributed("fsdp2", 4),
        "rank_levels": {
            "reduce_dtype": ("float32", "bfloat16"),
            "reshard_after_forward": (True, False),
        },
    },
)


def some_of(levels):
    return st.lists(st.sampled_from(levels), min_size=1, max_size=len(levels), unique=True)


@st.composite
def spaces(draw):
    effective = draw(st.none() | st.sampled_from([64, 256]))
    names = draw(st.lists(st.sampled_from(sorted(LEVELS)), max_size=2, unique=True))
    return Space(
        policies=tuple(draw(some_of(list(Policy)))),
        batch_sizes=tuple(sorted(draw(some_of([8, 16])))),
        effective_batch=effective,
        memory_formats=tuple(draw(some_of(["contiguous", "channels_last"]))),
        compile=tuple(draw(some_of([False, True]))),
        knobs={name: LEVELS[name] for name in names},
        float32_modules=draw(st.sampled_from([(), ("head",)])),
        alignments=tuple(draw(st.sampled_from([PADDINGS[:1], PADDINGS[:2], PADDINGS]))),
        **draw(st.sampled_from(RANKS)),
    )


@given(spaces())
def test_a_point_and_its_recipe_stand_for_each_other(space):
    for point in space.points():
        recipe = space.recipe(point)
        assert space.point(recipe) == point
        assert space.recipe(space.point(recipe)) == recipe


@given(spaces())
def test_there_is_one_recipe_for_every_combination_of_levels(space):
    points = space.points()
    count = 1
    for levels in space.levels().values():
        count *= len(levels)
    assert len(points) == count
    assert len({space.recipe(point).key() for point in points}) == count
    assert list(space.levels())[-1] == BATCH


@given(spaces())
def test_the_effective_batch_is_kept(space):
    for point in space.points():
        recipe = space.recipe(point)
        own = recipe.batch_size * space.world_size
        assert recipe.effective_batch == (space.effective_batch or own)
        assert recipe.world_size == space.world_size


@given(spaces())
def test_a_policy_brings_what_it_needs_and_nothing_else(space):
    for point in space.points():
        recipe = space.recipe(point)
        scaled = recipe.policy is Policy.MIXED_FLOAT16
        assert recipe.loss_scale == (LossScale() if scaled else None)
        assert recipe.float32_modules == (space.float32_modules if recipe.policy.mixed else ())


@given(spaces())
def test_only_knobs_that_are_turned_are_in_the_recipe(space):
    for point in space.points():
        for name, value in space.recipe(point).knobs.items():
            assert value == point[name] != space.knobs[name][0]


def test_what_refines_compiled_code_is_at_no_other_point():
    modes = ("default", "reduce-overhead", "max-autotune")
    knobs = {"compile_mode": modes, "compile_scope": ("model", "blocks"), "threads": (2, 1)}
    space = Space((Policy.FLOAT32,), (16, 64), 64, compile=(False, True), knobs=knobs)
    points = space.points()
    eager = [point for point in points if not point["compile"]]
    assert {(p["compile_mode"], p["compile_scope"]) for p in eager} == {("default", "model")}
    graphs = [point for point in points if point["compile_mode"] != "default"]
    assert {point[BATCH] for point in graphs} == {64}
    assert {point["compile_scope"] for point in graphs} == {"model", "blocks"}
    assert len({space.recipe(point).key() for point in points}) == len(points)
    for point in ({**eager[0], "compile_scope": "blocks"}, {**graphs[0], BATCH: 16}):
        assert not {"compile_scope", "compile_mode"} & set(space.recipe(point).knobs)


def test_padding_is_a_factor_only_where_there_is_a_choice():
    plain = Space((Policy.FLOAT32,), (8,))
    assert "alignment" not in plain.levels()
    padded = Space((Policy.FLOAT32,), (8,), alignments=PADDINGS)
    assert padded.levels()["alignment"] == (1, 8, 64)
    assert tuple(padded.recipe(point).alignment for point in padded.points()) == PADDINGS


@given(spaces())
def test_a_space_reads_back_as_it_was_written(space):
    assert from_plain(Space, to_plain(space)) == space


@pytest.mark.parametrize(("policies", "sizes"), [((), (8,)), ((Policy.FLOAT32,), ())])
def test_an_empty_space_is_refused(policies, sizes):
    with pytest.raises(UsageError, match="the search space is empty"):
        Space(policies, sizes)


def test_batches_that_do_not_divide_the_effective_batch_are_named():
    with pytest.raises(
        UsageError, match=r"batch sizes \[24, 48\] do not divide the task's own batch, 64"
    ):
        Space((Policy.FLOAT32,), (16, 24, 48), effective_batch=64)


def test_batches_that_do_not_divide_a_rank_s_part_are_named_with_the_ranks():
    ranks = Distributed("ddp", 4)
    assert Space((Policy.FLOAT32,), (16,), effective_batch=64, distributed=ranks).points()
    with pytest.raises(UsageError, match=r"batch sizes \[32\] on 4 ranks do not divide the task"):
        Space((Policy.FLOAT32,), (16, 32), effective_batch=64, distributed=ranks)


def test_fsdp2_gathers_what_the_policy_computes_in():
    space = Space(tuple(Policy), (8,), distributed=Distributed("fsdp2", 2))
    gathered = {
        each.policy: each.distributed.param_dtype for each in map(space.recipe, space.points())
    }
    assert gathered.pop(Policy.MIXED_BFLOAT16) is DType.BFLOAT16
    assert set(gathered.values()) == {None}
    ddp = Space((Policy.MIXED_BFLOAT16,), (8,), distributed=Distributed("ddp", 2))
    assert ddp.recipe(ddp.points()[0]).distributed == Distributed("ddp", 2)


# Batch sizes ------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_powers_of_two_are_all_there_are_between_the_ends(low, high):
    assert powers_of_two(low, high) == tuple(2**e for e in range(13) if low <= 2**e <= high)


@given(st.integers(1, 4096), st.integers(1, 64))
def test_micro_batches_divide_halve_and_end_with_the_whole(effective, low):
    sizes = micro_batches(effective, low=low)
    assert sizes[-1] == effective
    assert all(effective % size == 0 for size in sizes)
    assert all(large == 2 * small for small, large in pairwise(sizes))
    assert all(size >= low for size in sizes[:-1])
    assert sizes[0] % 2 or sizes[0] // 2 < low


@given(st.lists(st.integers(1, 2**24), min_size=1, max_size=6))
def test_a_list_of_batches_is_read_sorted_and_once_each(sizes):
    assert parse_batch_sizes(",".join(map(str, sizes))) == tuple(sorted(set(sizes)))
    assert parse_batch_sizes(sizes) == parse_batch_sizes(iter(sizes)) == tuple(sorted(set(sizes)))


@pytest.mark.parametrize("text", ["8-64", "8..64", "8:64", " 8 - 64 "])
def test_a_range_means_its_powers_of_two(text):
    assert parse_batch_sizes(text) == (8, 16, 32, 64)


def test_the_ends_of_a_range_are_in_it():
    assert parse_batch_sizes("12-100") == (12, 16, 32, 64, 100)
    assert parse_batch_sizes("32-32") == (32,)


@given(st.text() | st.text("0123456789-,.: ", max_size=12))
def test_any_text_is_batches_or_a_message(text):
    try:
        sizes = parse_batch_sizes(text)
    except UsageError:
        return
    assert sizes == tuple(sorted(set(sizes)))
    assert min(sizes) >= 1
    assert max(sizes) <= 2**24


@pytest.mark.parametrize("sizes", [64, None, [], [0], [-8], ["8"], [1.5], [8, 2**24 + 1]])
def test_a_list_that_is_none_of_batch_sizes_is_refused_too(sizes):
    with pytest.raises(UsageError, match="of integers from 1 to 16777216"):
        parse_batch_sizes(sizes)


@pytest.mark.parametrize(
    "text", ["", "0", "-8", "8-", "64-8", "8-16-32", "8,x", "1.5", "16777217", "1-" + "9" * 5000]
)
def test_what_is_no_batch_size_is_refused(text):
    with pytest.raises(UsageError, match="of integers from 1 to 16777216"):
        parse_batch_sizes(text)


@given(knobs)
def test_knobs_of_a_point_are_what_a_recipe_may_hold(values):
    """The first level is the default, which a recipe leaves out; any other stands in it."""
    held = {"policy": Policy.MIXED_BFLOAT16, "compile": True}  # what any knob may stand beside
    levels = {name: (None, v) for name, v in values.items()}
    space = Space((held["policy"],), (8,), compile=(True,), knobs=levels)
    points = space.points()
    assert len(points) == 2 ** len(values)
    assert space.recipe(points[0]) == Recipe(batch_size=8, **held)
    recipe = space.recipe(points[-1])
    assert recipe == Recipe(batch_size=8, knobs=values, **held)
    assert {name: points[-1][name] for name in values} == values
    assert from_plain(Recipe, to_plain(recipe)) == recipe


def test_float8_is_tried_in_compiled_bfloat16_alone():
    policies = (Policy.FLOAT32, Policy.MIXED_BFLOAT16)
    space = Space(policies, (8,), compile=(False, True), knobs={"float8": (False, True)})
    recipes = [space.recipe(point) for point in space.points()]
    assert len({recipe.key() for recipe in recipes}) == len(recipes) == 5
    (refined,) = (recipe for recipe in recipes if recipe.uses_float8)
    assert (refined.policy, refined.compile) == (Policy.MIXED_BFLOAT16, True)
    assert space.recipe(space.point(refined)) == refined
    proposed = {**space.point(refined), "compile": False}  # a sampler may propose it
    assert space.recipe(proposed) == replace(refined, compile=False, knobs={})


def test_points_are_told_apart_by_their_values_alone():
    assert point_key({"a": 1, "b": 2}) == point_key({"b": 2, "a": 1})
    assert point_key({"a": 1}) != point_key({"a": 2})
