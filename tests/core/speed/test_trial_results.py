"""What outcomes rule out, which of them are worth a final, and where the baseline settles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Alignment, Recipe
from autoprec.core.speed.acquisition import Limits, fitting_baseline, why_ruled_out
from autoprec.core.speed.selection import (
    OTHER_BATCH_SAME_SPEED_SHARE,
    SAME_SPEED_SHARE,
    Finalist,
    choose,
)
from autoprec.core.speed.space import BATCH, Space, point_key
from autoprec.core.speed.trial_results import (
    Outcome,
    Status,
    measured_rate,
    possibly_disturbed,
    shortlist,
)
from tests.core.speed.test_acquisition import LIMITS, SPACE, at, machines, measured

# What is ruled out --------------------------------------------------------------------------------

GROWING = [Status.OUT_OF_MEMORY, Status.WOULD_NOT_FIT, Status.TIMEOUT, Status.KILLED]


@pytest.mark.parametrize("status", GROWING)
def test_what_grows_worse_rules_out_the_same_and_larger_batches_of_its_arm(status):
    history = [Outcome(at(64), status)]
    assert why_ruled_out(at(64), history, LIMITS) == f"batch 64 ended with {status}"
    assert why_ruled_out(at(128), history, LIMITS)
    assert not why_ruled_out(at(32), history, LIMITS)
    assert not why_ruled_out(at(128, "mixed_bfloat16"), history, LIMITS)
    assert not why_ruled_out(at(128, memory_format="channels_last"), history, LIMITS)


@pytest.mark.parametrize("status", GROWING)
def test_what_is_padded_needs_no_less(status):
    plain, padded = {**at(64), "alignment": 1}, {**at(64), "alignment": 8}
    assert why_ruled_out(padded, [Outcome(plain, status)], LIMITS)
    assert not why_ruled_out(plain, [Outcome(padded, status)], LIMITS)
    assert not why_ruled_out({**padded, BATCH: 32}, [Outcome(plain, status)], LIMITS)


@pytest.mark.parametrize("status", [Status.UNSUPPORTED, Status.CRASHED])
def test_what_cannot_run_rules_out_its_whole_arm(status):
    history = [Outcome(at(64), status, reason="no such kernel"), Outcome(at(32), Status.TIMEOUT)]
    assert why_ruled_out(at(8), history, LIMITS) == "no such kernel"
    assert why_ruled_out(at(8), [Outcome(at(64), status)], LIMITS) == status
    assert not why_ruled_out(at(64, "mixed_float16"), history, LIMITS)


@pytest.mark.parametrize("status", [Status.UNSUPPORTED, Status.CRASHED])
@pytest.mark.parametrize(
    ("failed", "out", "open_"), [(64, [64, 128], [8, 16]), (8, [8], [16, 64, 128])]
)
def test_where_an_arm_has_run_a_failure_counts_further_from_there(status, failed, out, open_):
    history = [measured(at(32), 1000), Outcome(at(failed), status, reason="why")]
    assert [why_ruled_out(at(batch), history, LIMITS) for batch in out] == ["why"] * len(out)
    assert [why_ruled_out(at(batch), history, LIMITS) for batch in open_] == [""] * len(open_)
    assert why_ruled_out(at(failed, "mixed_float16"), history, LIMITS) == ""


def test_a_failure_between_batches_that_ran_counts_there_alone():
    history = [measured(at(8), 500), measured(at(128), 2000), Outcome(at(32), Status.UNSUPPORTED)]
    assert [bool(why_ruled_out(at(b), history, LIMITS)) for b in (16, 32, 64)] == [
        False,
        True,
        False,
    ]


def test_a_recipe_of_less_than_a_sample_per_second_ran_too():
    history = [measured(at(32), 0.5), Outcome(at(64), Status.UNSUPPORTED)]
    assert not why_ruled_out(at(16), history, LIMITS)


def test_data_that_are_too_short_rule_out_larger_batches_everywhere():
    history = [Outcome(at(64), Status.SHORT_DATA)]
    assert why_ruled_out(at(64, "tf32"), history, LIMITS) == (
        "the data hold fewer than 64 samples a batch"
    )
    assert not why_ruled_out(at(32, "tf32"), history, LIMITS)


def test_what_would_not_fit_is_ruled_out_with_the_numbers():
    gib = 2**30
    history = [measured(at(32), 100, peak=4 * gib), measured(at(64), 100, peak=8 * gib)]
    limits = Limits(memory_bytes=10 * gib)
    assert why_ruled_out(at(128), history, limits) == (
        "would need about 17.6 GiB of the 10.0 GiB available"
    )
    assert not why_ruled_out(at(64), history, limits)
    assert not why_ruled_out(at(128), history, LIMITS)
    assert not why_ruled_out(at(128), [measured(at(32), 100)], limits)
    assert not why_ruled_out(at(64), history, Limits(memory_bytes=8 * gib))  # just so much
    unknown = [history[0], measured(at(64), 100, peak=0)]
    assert why_ruled_out(at(128), unknown, limits) == why_ruled_out(at(128), history, limits)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SPACE.points()), machines, st.integers(1, 10**4))
def test_less_memory_never_lets_more_run(point, machine, memory):
    history = [machine.run(at(batch)) for batch in (8, 16)]
    if why_ruled_out(point, history, Limits(memory_bytes=memory)):
        assert why_ruled_out(point, history, Limits(memory_bytes=memory / 2))


# Outcomes -----------------------------------------------------------------------------------------


def test_the_rate_of_an_outcome_is_its_own_without_the_drift():
    outcome = Outcome(at(32), Status.OK, Measurement(0.5, 0.5, 0.5, 8, 32), drift=0.8)
    assert outcome.rate == pytest.approx(80)
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
        close = [o for o in history if o.rate >= best * (1 - OTHER_BATCH_SAME_SPEED_SHARE)]
        assert chosen[0].rate >= best * (1 - SAME_SPEED_SHARE)
        assert chosen[0].point[BATCH] == min(o.point[BATCH] for o in close)
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


@pytest.mark.parametrize(("rate", "batch"), [(100.3, 32), (100.0, 64)])
def test_a_smaller_batch_is_taken_only_where_nothing_is_lost(rate, batch):
    """In a race a per cent is less than two batches' ratio is known to."""
    history = [measured(at(64), 100.5), measured(at(32), rate)]
    assert shortlist(history, SPACE)[0].point[BATCH] == batch


def curve(**slower):
    """Rates that grow with the batch as steps of 4 ms and 0.1 ms a sample do, but for some."""
    sizes = {f"b{size}": size for size in (32, 64, 128, 256)}
    rates = {name: size / (4e-3 + 1e-4 * size) for name, size in sizes.items()}
    return [measured(at(sizes[n]), rate * slower.get(n, 1.0)) for n, rate in rates.items()]


def test_who_ran_as_fast_as_the_others_foresee_is_not_in_doubt():
    assert possibly_disturbed(curve()) == ()
    assert possibly_disturbed(curve(b32=0.7)) == ()  # slow, but at its best not the fastest
    assert possibly_disturbed([]) == possibly_disturbed(curve()[:1]) == ()


@pytest.mark.parametrize(("factor", "doubted"), [(0.95, False), (0.75, True), (0.5, False)])
def test_the_largest_batch_is_in_doubt_if_a_neighbour_may_have_slowed_it(factor, doubted):
    """By a few per cent recipes differ anyway; half as fast is a recipe's own doing."""
    history = curve(b256=factor)
    assert possibly_disturbed(history) == ((history[-1],) if doubted else ())


@pytest.mark.parametrize(("best", "doubted"), [(9000, True), (9200, False)])
def test_only_who_is_foreseen_within_a_twentieth_of_the_fastest_is_in_doubt(best, doubted):
    """Batch 256 is foreseen at 8685 samples per second, whoever else is the fastest."""
    history = [*curve(b256=0.75), measured(at(32, "mixed_bfloat16"), best)]
    assert possibly_disturbed(history) == ((history[3],) if doubted else ())


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
    slow = [replace(o, drift=1e5) for o in curve(b256=0.75)]
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
    outcome = Outcome(point, Status.OK, Measurement(0.1, low, high, 8, 32), drift=0.5)
    told = measured_rate(outcome)
    assert told.point == point
    assert told.log_rate == pytest.approx(math.log(640))
    assert told.deviation == pytest.approx(deviation)


def test_a_final_is_run_by_three():
    assert len(shortlist(curve(), SPACE)) == 3


def test_failed_trials_are_not_in_doubt():
    history = [*curve()[:-1], Outcome(at(256), Status.OUT_OF_MEMORY)]
    assert possibly_disturbed(history) == ()


def test_the_baseline_settles_at_the_largest_batch_that_fits() -> None:
    space = Space((Policy.FLOAT32,), (8, 16, 32, 64))
    start = space.point(Recipe(batch_size=32))

    def ended(batch: int, status: Status) -> Outcome:
        return Outcome({**start, BATCH: batch}, status)

    assert fitting_baseline(space, start, []) == start
    full = ended(32, Status.OUT_OF_MEMORY)
    assert fitting_baseline(space, start, [full]) == {**start, BATCH: 16}
    fits = replace(
        ended(16, Status.OK), measurement=Measurement(1.0, 1.0, 1.0, 5, samples_per_step=16)
    )
    assert fitting_baseline(space, start, [full, fits]) == {**start, BATCH: 16}
    slow = replace(fits, measurement=Measurement(99.0, 99.0, 99.0, 5, samples_per_step=16))
    assert fitting_baseline(space, start, [full, slow]) == {**start, BATCH: 16}
    everywhere = [ended(batch, Status.KILLED) for batch in (32, 16, 8)]
    assert fitting_baseline(space, start, everywhere) is None
    assert fitting_baseline(space, start, [ended(32, Status.CRASHED)]) is None
