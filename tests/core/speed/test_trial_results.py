"""Outcomes: which are worth a final, and which may have been disturbed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Alignment, Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.selection import Finalist, choose
from autoprec.core.speed.space import BATCH, point_key
from autoprec.core.speed.trial_results import (
    Outcome,
    Status,
    measured_rate,
    possibly_disturbed,
    ran,
    setup_seconds,
    shortlist,
)
from tests.core.speed.machines import (
    SPACE,
    at,
    measured,
)


def test_the_rate_of_an_outcome_is_that_of_a_trial_that_ran():
    outcome = Outcome(at(32), Status.OK, Measurement(0.5, 0.5, 0.5, 8, 32))
    assert outcome.rate == pytest.approx(64)
    assert Outcome(at(32), Status.OK).rate == 0
    assert Outcome(at(32), Status.TIMEOUT, outcome.measurement).rate == 0


def test_an_outcome_reads_back_as_it_was_written():
    outcome = measured(at(32), 100)
    assert from_plain(Outcome, to_plain(outcome)) == outcome


rates = st.lists(
    st.tuples(st.sampled_from(SPACE.points()), st.floats(0.1, 1e4) | st.floats(99, 100)),
    max_size=12,
    unique_by=lambda pair: point_key(pair[0]),
)


@given(rates, st.integers(1, 5))
def test_the_shortlist_holds_the_fastest_with_the_smallest_batch_of_the_close_ones_first(
    pairs, count
):
    history = [measured(point, rate) for point, rate in pairs]
    chosen = shortlist(history, SPACE, count=count)
    assert len(chosen) == min(count, len(history))
    assert len({id(outcome) for outcome in chosen}) == len(chosen)
    if chosen:
        best = max(outcome.rate for outcome in history)
        size = min(o.point[BATCH] for o in history if o.rate >= best * (1 - SPEED.knee_share))
        assert chosen[0].point[BATCH] == size
        alike = max(o.rate for o in history if o.point[BATCH] == size)
        assert chosen[0].rate >= alike * (1 - SPEED.same_speed_share)
        rest = [outcome.rate for outcome in chosen[1:]]
        assert rest == sorted(rest, reverse=True)


def test_failed_trials_are_on_no_shortlist():
    assert shortlist([Outcome(at(32), Status.CRASHED)], SPACE) == ()


#: A space with every kind of setting.
WIDE = replace(
    SPACE,
    compile=(False, True),
    alignments=(Alignment(), Alignment(8, ("body",))),
    knobs={"fused_optimizer": (False, True), "threads": (8, 4)},
)

WIDE_PLAIN = {**at(32), "alignment": 1, "fused_optimizer": False, "threads": 8}

OTHER_SETTINGS = [
    {"policy": "mixed_bfloat16"},
    {"memory_format": "channels_last"},
    {"compile": True},
    {"alignment": 8},
    {"fused_optimizer": True},
    {"threads": 4},
]


@pytest.mark.parametrize("other", OTHER_SETTINGS)
def test_among_equally_fast_recipes_of_a_batch_the_simplest_is_first(other):
    history = [measured({**WIDE_PLAIN, **other}, 101), measured(WIDE_PLAIN, 100.1)]
    assert shortlist(history, WIDE)[0].point == WIDE_PLAIN
    faster = [measured({**WIDE_PLAIN, **other}, 101), measured(WIDE_PLAIN, 99.9)]
    assert shortlist(faster, WIDE)[0].point == {**WIDE_PLAIN, **other}


def test_every_setting_counts_once_and_what_a_space_does_not_have_not_at_all():
    """A knob weighs as much as a policy; what a space has no levels of is plain."""
    knob, policy = {**WIDE_PLAIN, "fused_optimizer": True}, {**WIDE_PLAIN, "policy": "tf32"}
    assert shortlist([measured(knob, 100.9), measured(policy, 100.1)], WIDE)[0].point == knob
    assert shortlist([measured(policy, 100.9), measured(knob, 100.1)], WIDE)[0].point == policy
    bare, space = at(32, "tf32"), replace(SPACE, compile=(False, True))
    compiled = {**bare, "compile": True}
    assert shortlist([measured(compiled, 100.9), measured(bare, 100.1)], space)[0].point == bare
    one = at(32, compile=True)
    assert shortlist([measured(one, 100.9), measured(bare, 100.1)], space)[0].point == one


wide_points = st.sampled_from(
    [{**WIDE_PLAIN, **o, BATCH: b} for o in OTHER_SETTINGS for b in (32, 64)]
)


@given(st.lists(wide_points, min_size=1, max_size=4, unique_by=point_key))
def test_the_shortlist_and_the_last_choice_prefer_the_same_of_equally_fast_recipes(points):
    """Threads included: the number that the framework starts by itself is plain."""
    first = shortlist([measured(point, 200) for point in (*points, WIDE_PLAIN)], WIDE)[0]
    finalists = [Finalist(WIDE.recipe(p), (200.0,) * 7) for p in (*points, WIDE_PLAIN)]
    chosen = choose(Finalist(Recipe(batch_size=8), (100.0,) * 7), finalists)
    assert WIDE.recipe(first.point) == chosen.recipe == WIDE.recipe(WIDE_PLAIN)


@given(st.lists(wide_points, min_size=2, max_size=4, unique_by=point_key))
def test_both_choices_agree_without_a_plain_recipe_among_the_equally_fast(points):
    first = shortlist([measured(point, 200) for point in points], WIDE)[0]
    finalists = [Finalist(WIDE.recipe(point), (200.0,) * 7) for point in points]
    chosen = choose(Finalist(Recipe(batch_size=8), (100.0,) * 7), finalists)
    assert WIDE.recipe(first.point) == chosen.recipe


@pytest.mark.parametrize(
    ("share", "rate", "batch"),
    [
        (SPEED.most_share, 99.8, 32),
        (SPEED.most_share, 99.7, 64),
        (SPEED.knee_share, 98.1, 32),
        (SPEED.knee_share, 97.9, 64),
    ],
)
def test_a_smaller_batch_is_taken_within_the_spaces_share(share, rate, batch):
    history = [measured(at(64), 100), measured(at(32), rate)]
    space = replace(SPACE, batch_share=share)
    assert shortlist(history, space)[0].point[BATCH] == batch


def test_a_batch_that_the_loader_does_not_feed_is_not_preferred():
    def fed(point, rate, loader):
        outcome = measured(point, rate)
        assert outcome.measurement is not None
        seconds = outcome.measurement.samples_per_step / loader
        return replace(outcome, measurement=replace(outcome.measurement, data_seconds=seconds))

    history = [fed(at(32), 100, 90.0), fed(at(64), 200, 91.0)]
    assert shortlist(history, SPACE)[0].point[BATCH] == 32
    assert shortlist([history[0], fed(at(64), 200, 150.0)], SPACE)[0].point[BATCH] == 64


def curve(**slower):
    """Rates that grow with the batch as steps of 4 ms and 0.1 ms a sample do, but for some."""
    sizes = {f"b{size}": size for size in (32, 64, 128, 256)}
    rates = {name: size / (4e-3 + 1e-4 * size) for name, size in sizes.items()}
    return [measured(at(sizes[n]), rate * slower.get(n, 1.0)) for n, rate in rates.items()]


def test_who_ran_as_fast_as_the_others_foresee_is_not_in_doubt():
    assert possibly_disturbed(curve()) == ()
    assert possibly_disturbed(curve(b32=0.7)) == ()  # slow, but at its best not the fastest
    assert possibly_disturbed([]) == possibly_disturbed(curve()[:1]) == ()


@pytest.mark.parametrize(("factor", "suspected"), [(0.95, False), (0.75, True), (0.5, False)])
def test_the_largest_batch_is_in_doubt_if_a_neighbour_may_have_slowed_it(factor, suspected):
    """By a few per cent recipes differ anyway; half as fast is a recipe's own doing."""
    history = curve(b256=factor)
    assert possibly_disturbed(history) == ((history[-1],) if suspected else ())


@pytest.mark.parametrize(("best", "suspected"), [(9200, True), (9400, False)])
def test_only_who_is_foreseen_within_a_twentieth_of_the_fastest_is_in_doubt(best, suspected):
    """Batch 256 is foreseen at 8800 samples per second, whoever else is the fastest."""
    history = [*curve(b256=0.75), measured(at(32, "mixed_bfloat16"), best)]
    assert possibly_disturbed(history) == ((history[3],) if suspected else ())


def test_of_several_in_doubt_the_one_foreseen_to_be_the_fastest_comes_first():
    history = curve(b256=0.75)
    faster = [
        measured({**o.point, "policy": "mixed_bfloat16"}, 1.02 * o.rate) for o in curve(b256=0.75)
    ]
    assert possibly_disturbed([*history, *faster]) == (faster[3], history[3])


def test_recipes_that_are_exactly_alike_are_in_doubt_alike():
    """Two of them are foreseen at one rate: their order is the history's."""
    fast = [
        measured(at(size, memory_format=form), 1000)
        for size in (8, 16, 32, 64, 128, 256)
        for form in ("contiguous",)
    ]
    twins = [measured(at(32, policy), 700) for policy in ("mixed_bfloat16", "mixed_float16")]
    others = [
        measured(at(size, policy), 1000)
        for policy in ("mixed_bfloat16", "mixed_float16")
        for size in (8, 16, 64, 128)
    ]
    assert possibly_disturbed([*fast, *others, *twins]) == tuple(twins)


def test_who_is_slower_than_a_sample_per_second_may_be_in_doubt_too():
    slow = [measured(o.point, o.rate / 1e5) for o in curve(b256=0.75)]
    assert possibly_disturbed(slow) == (slow[-1],)


def test_the_fastest_is_never_in_doubt_however_fast_it_was_foreseen():
    assert possibly_disturbed([measured(at(32), 70), measured(at(64), 100)]) == ()


@pytest.mark.parametrize(
    ("low", "high", "deviation"),
    [
        (0.1, 0.1, 0.0),
        (0.0, 0.2, 0.0),  # not known
        (0.09, 0.11, math.log(0.11 / 0.09) / 4),  # a 95 % interval is four deviations wide
        (2.0, 2.2, math.log(1.1) / 4),
        (0.05, 0.2, 0.2),  # at most a fifth
    ],
)
def test_the_model_is_told_how_sure_a_measurement_is(low, high, deviation):
    point = at(32)
    outcome = Outcome(point, Status.OK, Measurement(0.1, low, high, 8, 32))
    told = measured_rate(outcome)
    assert told.point == point
    assert told.log_rate == pytest.approx(math.log(320))
    assert told.deviation == pytest.approx(deviation)


def test_a_final_is_run_by_three():
    assert len(shortlist(curve(), SPACE)) == 3


def test_failed_trials_are_not_in_doubt():
    history = [*curve()[:-1], Outcome(at(256), Status.OUT_OF_MEMORY)]
    assert possibly_disturbed(history) == ()


@pytest.mark.parametrize(
    ("status", "rate", "expected"),
    [(Status.OK, 0.5, True), (Status.OK, 100.0, True), (Status.CRASHED, 100.0, False)],
)
def test_a_trial_that_did_not_fail_ran(status: Status, rate: float, expected: bool) -> None:
    measured = Measurement(1.0, 1.0, 1.0, 9, rate)
    assert ran(Outcome(SPACE.points()[0], status, measured)) is expected


def timed(seconds: float, warmup: float = 0.0) -> Outcome:
    steady = Measurement(seconds, 0.9 * seconds, 1.1 * seconds, 8, 32.0, warmup_seconds=warmup)
    return Outcome(at(32), Status.OK, steady)


def test_the_setup_of_trials_is_the_median_of_those_that_ran():
    assert setup_seconds([Outcome(at(32), Status.TIMEOUT)]) is None
    assert setup_seconds([timed(0.1, 2.0), timed(0.1, 40.0), timed(0.1, 3.0)]) == 3.0
