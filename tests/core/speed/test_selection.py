"""What must hold of the choice: never what may be slower, and the smallest of what is as fast."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import Measurement
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Alignment, Distributed, Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.selection import (
    Finalist,
    choose,
    count_settings,
    finalist_of,
    simplest_of_fastest,
    smallest_of_fastest,
)

PLAIN = Recipe(batch_size=32)
ROUNDS = 7

recipes = st.builds(
    Recipe,
    policy=st.sampled_from(Policy),
    batch_size=st.sampled_from([8, 32, 128]),
    compile=st.booleans(),
    memory_format=st.sampled_from(["contiguous", "channels_last"]),
)
rates = st.lists(st.floats(50, 200), min_size=ROUNDS, max_size=ROUNDS).map(tuple)
finalists = st.builds(Finalist, recipes, rates)
fields = st.lists(finalists, max_size=4)


def steady(recipe, rate):
    return Finalist(recipe, (rate,) * ROUNDS)


@given(rates, fields)
def test_what_may_be_no_faster_than_the_baseline_is_never_taken(own, others):
    baseline = Finalist(PLAIN, own)
    choice = choose(baseline, others)
    if choice.recipe is not PLAIN:
        assert choice.ratio.low > 1.0
        assert choice.ratio.ratio > 1.0 + SPEED.min_gain
        assert any(
            choice.recipe is other.recipe and choice.ratio == paired_ratio(other.rates, own)
            for other in others
        )
    else:
        assert choice.ratio == Ratio(1.0, 1.0, 1.0, ROUNDS)


@given(rates, fields, st.booleans(), st.sampled_from([SPEED.knee_share, SPEED.most_share]))
def test_nothing_allowed_is_faster_beyond_the_tolerance_or_as_fast_and_smaller(
    own, others, allowed, share
):
    baseline = Finalist(PLAIN, own)
    choice = choose(baseline, others, baseline_allowed=allowed, share=share)
    assume(choice.recipe is not PLAIN)
    ratios = [(other.recipe.batch_size, paired_ratio(other.rates, own)) for other in others]
    worth = [
        (b, r) for b, r in ratios if not allowed or (r.low > 1.0 and r.ratio > 1.0 + SPEED.min_gain)
    ]
    best = max(r.ratio for _, r in worth)
    as_fast = [batch for batch, r in worth if r.ratio >= best * (1 - share)]
    assert choice.recipe.batch_size == min(as_fast)
    alike = max(r.ratio for batch, r in worth if batch == min(as_fast))
    assert choice.ratio.ratio >= alike * (1 - SPEED.same_speed_share)


@given(rates, st.lists(finalists, min_size=1, max_size=4))
def test_without_float32_one_of_the_others_is_taken_whatever_its_speed(own, others):
    choice = choose(Finalist(PLAIN, own), others, baseline_allowed=False)
    assert any(choice.recipe is other.recipe for other in others)


def test_drift_that_all_share_changes_nothing():
    drift = (1.0, 0.5, 2.0, 1.5, 0.7, 1.0, 0.9)
    fast = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=32)
    baseline = Finalist(PLAIN, tuple(100 * d for d in drift))
    choice = choose(baseline, [Finalist(fast, tuple(150 * d for d in drift))])
    assert choice.recipe == fast
    assert choice.ratio.low == pytest.approx(1.5)
    assert choice.ratio.high == pytest.approx(1.5)


def test_a_gain_that_is_not_sure_is_not_taken():
    lucky = Finalist(Recipe(compile=True), (300.0,) * 5 + (90.0, 80.0))
    choice = choose(steady(PLAIN, 100.0), [lucky])
    assert choice.recipe is PLAIN
    assert choice.reason == (
        "nothing beats the baseline beyond the noise: the best of the rest, float32 at batch 32, "
        "reaches 3.00x (0.90-3.00, 7 rounds)"
    )


def test_a_gain_that_is_not_worth_it_is_not_taken():
    assert choose(steady(PLAIN, 100.0), [steady(Recipe(compile=True), 101.5)]).recipe is PLAIN
    assert choose(steady(PLAIN, 100.0), [steady(Recipe(compile=True), 102.5)]).recipe.compile


@pytest.mark.parametrize(
    ("rates", "taken"),
    [((105.0,) * 3, False), ((107.0,) * 3, True), ((90.0, 120.0, 120.0), False)],
)
def test_what_is_only_as_fast_or_gains_just_what_is_not_worth_it_is_not_taken(rates, taken):
    """Three rounds that agree may do so by chance: they are known to 6 % at best."""
    choice = choose(Finalist(PLAIN, (100.0,) * 3), [Finalist(Recipe(compile=True), rates)])
    assert choice.recipe.compile is taken
    if taken:
        assert choice.reason == "the fastest of those that train like float32"


def test_with_nothing_to_compare_the_baseline_is_chosen():
    choice = choose(steady(PLAIN, 100.0), [])
    assert choice.recipe is PLAIN
    assert choice.reason == "nothing else was left to compare with"


ROUNDED_REDUCTION = Distributed("ddp", 2, reduce_dtype=DType.BFLOAT16)
ROUNDING = [
    ({"knobs": {"implicit_bfloat16": True}}, {}),
    ({"distributed": ROUNDED_REDUCTION}, {"distributed": ROUNDED_REDUCTION.in_float32()}),
]


@pytest.mark.parametrize(("rounding", "exact"), ROUNDING)
def test_rounding_that_no_policy_asks_for_is_kept_only_where_it_gains_beyond_the_noise(
    rounding, exact
):
    fast = Recipe(policy=Policy.MIXED_BFLOAT16, **rounding)
    less = Recipe(policy=Policy.MIXED_BFLOAT16, **exact)
    other_batch = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=64, **exact)
    noisy = Finalist(fast, (230.0,) * (ROUNDS - 2) + (190.0, 180.0))
    sure = Finalist(fast, (230.0,) * ROUNDS)
    slight = steady(fast, 203)
    without = [steady(less, 200), steady(other_batch, 200)]

    def chosen(finalist):
        return choose(steady(PLAIN, 100.0), [finalist, *without]).recipe

    assert chosen(noisy) == less
    assert chosen(slight) == less, "1.5 % is not worth a risk"
    assert chosen(sure) == fast
    assert choose(steady(PLAIN, 100.0), [noisy, without[1]]).recipe == fast, "another batch"
    slower = Finalist(less, (99.0,) * ROUNDS)
    assert choose(steady(PLAIN, 100.0), [noisy, slower]).recipe == fast, "slower than float32"


def test_of_two_roundings_each_must_gain_by_itself():
    both = Recipe(
        policy=Policy.MIXED_BFLOAT16,
        knobs={"implicit_bfloat16": True, "fused_optimizer": True},
        distributed=ROUNDED_REDUCTION,
    )
    one = replace(both, distributed=ROUNDED_REDUCTION.in_float32())
    none = replace(one, knobs={"fused_optimizer": True})
    simple = replace(one, knobs={})
    field = [steady(both, 210), steady(one, 209), steady(none, 180), steady(simple, 180.5)]
    assert choose(steady(PLAIN, 100.0), field).recipe == one
    field[2:] = [steady(none, 208), steady(simple, 209)]
    assert choose(steady(PLAIN, 100.0), field).recipe == simple


def test_of_equally_fast_ones_the_smallest_batch_then_the_simplest_then_the_fastest_wins():
    small = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=64)
    tangled = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=64, compile=True)
    large = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=128)
    twin = Recipe(policy=Policy.TF32, batch_size=64)
    field = [steady(large, 203), steady(tangled, 202.6), steady(twin, 202), steady(small, 202.1)]
    own = steady(PLAIN, 100.0)
    assert choose(own, field, share=SPEED.most_share).recipe == small
    assert choose(own, [field[0], steady(tangled, 202.4)], share=SPEED.most_share).recipe == large
    assert choose(own, [field[0], steady(tangled, 199)]).recipe == tangled, "the knee"
    assert choose(own, [field[0], steady(tangled, 198.9)]).recipe == large
    assert choose(own, [field[1], steady(small, 200)]).recipe == tangled


def test_what_is_just_near_enough_is_as_fast():
    """The edges of both tolerances belong to them."""
    settings = ({"policy": Policy.TF32}, {"compile": True}, {"memory_format": "channels_last"})

    def recipe(batch, count):
        chosen = {name: value for each in settings[:count] for name, value in each.items()}
        return Recipe(batch_size=batch, **chosen)

    def winner(*items):
        return simplest_of_fastest(items, operator.itemgetter(0), lambda item: recipe(*item[1:]))

    fast, edge = (100.0, 64, 1), (100.0 * (1 - SPEED.knee_share), 32, 3)
    assert winner(fast, edge) == edge
    mate = (edge[0] * (1 - SPEED.same_speed_share), 32, 2)
    assert winner(fast, edge, mate) == mate
    assert winner(fast, (edge[0] - 0.01, 32, 3)) == fast
    assert winner(fast, edge, (mate[0] - 0.01, 32, 2)) == edge


def test_a_batch_is_worth_no_more_than_the_loader_feeds():
    """Within the error of its timing; recipes of that batch are compared by their steps."""
    low = {"policy": Policy.MIXED_BFLOAT16}
    own = steady(PLAIN, 100.0)
    small = Finalist(Recipe(batch_size=64, **low), (300.0,) * ROUNDS, loader_feeds=250.0)
    large = Finalist(Recipe(batch_size=128, **low), (400.0,) * ROUNDS, loader_feeds=255.0)
    assert choose(own, [large, small]).recipe is small.recipe
    assert choose(own, [small, replace(large, loader_feeds=399.0)]).recipe is large.recipe
    edge = 250.0 / (1 - SPEED.loader_share)
    assert choose(own, [small, replace(large, loader_feeds=edge + 1)]).recipe is large.recipe
    plain = Finalist(Recipe(batch_size=64), (251.0,) * ROUNDS, loader_feeds=250.0)
    assert choose(own, [plain, small]).recipe is small.recipe


@pytest.mark.parametrize(
    "setting",
    [
        {"policy": Policy.TF32},
        {"memory_format": "channels_last"},
        {"compile": True},
        {"knobs": {"threads": 2}},
        {"float32_modules": ("head",)},
        {"alignment": Alignment(8, ("body",))},
        {"accumulation_steps": 2},
        {"distributed": ROUNDED_REDUCTION},
    ],
)
def test_every_setting_that_differs_from_plain_training_counts_once(setting):
    assert count_settings(Recipe()) == 0
    assert count_settings(Recipe(**setting)) == 1


def test_a_finalist_has_the_rate_of_every_round_and_the_fastest_feed_of_its_loader():
    one = Measurement(0.5, 0.5, 0.5, 8, 32, data_seconds=0.4)
    quicker = replace(one, data_seconds=0.25)
    slower = replace(one, step_seconds=1.0)
    recipe = Recipe(batch_size=16)
    rates = (64.0, 64.0, 32.0)
    assert finalist_of(recipe, [one, quicker, slower]) == Finalist(recipe, rates, 128.0)
    at_once = replace(slower, data_seconds=0.0)
    assert finalist_of(recipe, [one, quicker, at_once]) == Finalist(recipe, rates, None)


@pytest.mark.parametrize(
    ("rates", "feeds", "smallest"),
    [
        pytest.param((96.0, 100.0), (math.inf, math.inf), 64, id="steps alone"),
        pytest.param(
            (200.0, 200.0), (96.0, 100.0), 32, id="what a loader feeds is known less well"
        ),
        pytest.param((200.0, 200.0), (94.0, 100.0), 64, id="but well enough for this"),
        pytest.param((96.0, 100.0), (96.0, 100.0), 64, id="fed just as fast as it steps"),
    ],
)
def test_batches_that_a_loader_limits_are_told_apart_less_well(rates, feeds, smallest):
    items = list(zip(rates, feeds, (32, 64), strict=True))
    found = smallest_of_fastest(
        items, lambda item: item[0], lambda item: item[1], lambda item: item[2], share=0.02
    )
    assert found == smallest


def test_a_loader_that_feeds_more_than_steps_take_decides_nothing():
    baseline = steady(Recipe(batch_size=8), 100.0)
    feeds = {32: 300.0, 64: 400.0}
    others = [
        replace(steady(Recipe(batch_size=batch), 200.0), loader_feeds=fed)
        for batch, fed in feeds.items()
    ]
    assert choose(baseline, others).recipe.batch_size == 32
