"""When the search stops, and what is not worth a trial."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.speed.acquisition import Next, next_point
from autoprec.core.speed.cost_model import Prediction
from autoprec.core.speed.space import BATCH, Space
from autoprec.core.speed.stopping import (
    Limits,
    Stop,
    is_worth_a_trial,
    nothing_worth_a_trial,
    time_limit_reached,
    trial_limit_reached,
)
from autoprec.core.speed.trial_results import Outcome, Status
from tests.core.speed.machines import (
    BASELINE,
    LIMITS,
    ONE,
    SPACE,
    Machine,
    at,
    measured,
    ran,
    search,
)


def test_a_search_of_one_point_ends_when_it_is_measured():
    space = Space((Policy.FLOAT32,), (32,))
    assert next_point(space, BASELINE, [], LIMITS) == Next(BASELINE, "the baseline")
    history, stop = search(Machine(), space=space)
    assert [outcome.point for outcome in history] == [BASELINE]
    assert stop == Stop("every recipe that fits has been measured")


def test_a_trial_costs_the_setup_that_trials_took_and_is_as_cheap_by_its_steps():
    assert LIMITS.with_setup(None) is LIMITS
    slow = LIMITS.with_setup(7.5)
    assert slow.trial_seconds(0.01) == 7.5 + LIMITS.timed_seconds
    assert slow.cheap_seconds - slow.setup_seconds == LIMITS.cheap_seconds - LIMITS.setup_seconds


def test_the_limit_of_trials_is_named():
    assert search(Machine(), Limits(trials=2))[1] == Stop("the limit of 2 trials is reached")


def test_no_long_trial_is_spent_on_a_small_gain():
    """At minutes a step, what is only a per cent or two better is not looked for."""
    slow = Outcome(BASELINE, Status.OK, Measurement(100.0, 99.0, 101.0, 4, 32.0))
    history = [slow]
    for policy in ("mixed_bfloat16", "mixed_float16"):
        point = {**BASELINE, "policy": policy}
        history.append(Outcome(point, Status.OK, Measurement(400.0, 399.0, 401.0, 4, 32.0)))
    quick = [
        Outcome(
            o.point,
            o.status,
            replace(
                o.measurement,
                step_seconds=o.measurement.step_seconds / 1000,
                low=o.measurement.low / 1000,
                high=o.measurement.high / 1000,
            ),
        )
        for o in history
    ]

    def count(found):
        while isinstance(decision := next_point(SPACE, BASELINE, found, LIMITS), Next):
            law = found[0].measurement.step_seconds * int(decision.point[BATCH]) / 32
            step = law * (1 if decision.point["policy"] == "float32" else 4)
            found.append(
                Outcome(
                    decision.point,
                    Status.OK,
                    Measurement(step, step * 0.99, step * 1.01, 4, int(decision.point[BATCH])),
                )
            )
        return len(found)

    assert count(list(history)) < count(list(quick))


@pytest.mark.parametrize("low", [0.0, 0.05])
def test_a_wide_or_unknown_interval_does_not_stop_the_search(low):
    outcome = Outcome(BASELINE, Status.OK, Measurement(0.1, low, 0.2, 8, 32))
    assert isinstance(next_point(SPACE, BASELINE, [outcome], LIMITS), Next)


def test_a_dear_trial_must_promise_more():
    """A tenth is expected of batch 256: worth 4 seconds at 2 % for a second, not at 5 %."""
    history = ran([32, 8, 16, 64, 128])
    dear = replace(LIMITS, setup_seconds=2.9)
    cheap = replace(dear, gain_per_second=0.02)
    decision = next_point(ONE, at(32), history, cheap)
    assert decision.point == at(256)
    gain = float(decision.reason.removeprefix("expected gain ").removesuffix("%")) / 100
    assert 0.02 * 4 < math.log1p(gain) < 0.05 * 4
    assert isinstance(next_point(ONE, at(32), history, replace(dear, gain_per_second=0.05)), Stop)


def test_what_is_not_likely_to_be_faster_is_not_tried_for_however_small_a_price():
    history = [*ran([32, 8, 16, 128], flat=True), measured(at(256), 1150.0)]
    free = replace(LIMITS, gain_per_second=0.0, cheap_seconds=0.0)
    assert isinstance(next_point(ONE, at(32), history, free), Stop)
    assert isinstance(next_point(ONE, at(32), history, replace(free, optimism=1e3)), Next)


def test_a_trial_must_be_hoped_to_be_faster_and_gain_enough_for_its_seconds():
    limits = Limits(gain=0.01, optimism=2.0, gain_per_second=0.01)
    likely = Prediction(1.0, 0.1)
    expected = likely.expected_gain(1.0)
    assert is_worth_a_trial(likely, 0.9 * expected / 0.01, 1.0, limits)
    assert not is_worth_a_trial(likely, 1.1 * expected / 0.01, 1.0, limits)
    # Two standard deviations above its prediction it is 20 % faster than the fastest, or less.
    free = replace(limits, gain_per_second=0.0)
    assert is_worth_a_trial(likely, 1.0, 1.18, free)
    assert not is_worth_a_trial(likely, 1.0, 1.2, free)


def test_without_a_limit_any_number_of_trials_may_run():
    assert trial_limit_reached(10**6, Limits()) is None
    assert trial_limit_reached(2, Limits(trials=3)) is None
    assert trial_limit_reached(3, Limits(trials=3)) == Stop("the limit of 3 trials is reached")


def test_the_reason_to_stop_names_the_gain_that_was_looked_for():
    assert nothing_worth_a_trial(Limits(gain=0.05)) == Stop(
        "no untried recipe is likely to be more than 5% faster"
    )


def test_exactly_the_least_gain_is_not_enough():
    certain = Prediction(0.5, 0.0)  # a quarter above the fastest
    assert not is_worth_a_trial(certain, 0.0, 0.25, Limits(gain=0.25))
    assert is_worth_a_trial(certain, 0.0, 0.25, Limits(gain=0.125))
    a_second = Limits(gain=0.125, gain_per_second=0.25)
    assert not is_worth_a_trial(certain, 1.0, 0.25, a_second)
    assert is_worth_a_trial(certain, 0.5, 0.25, a_second)


@pytest.mark.parametrize(
    ("left", "searched", "limit", "said"),
    [
        (0.1, 99.0, None, ""),
        (0.1, 9.9, 10.0, ""),
        (0.0, 0.0, None, "its share of the time limit of 60 s is used up"),
        (0.0, 10.0, 10.0, "its share of the time limit of 60 s is used up"),
        (0.1, 10.0, 10.0, "the search's limit of 10 s is reached"),
    ],
)
def test_it_ends_when_a_limit_of_time_is_reached(
    left: float, searched: float, limit: float | None, said: str
) -> None:
    stop = time_limit_reached(left, 60.0, searched, limit)
    assert (stop.reason if stop is not None else "") == said


def test_a_trial_costs_its_setup_and_steps_and_more_than_any_gain_if_it_cannot_be_proven() -> None:
    limits = Limits(longest_step=2.0)
    assert limits.trial_seconds(2.0) == limits.setup_seconds + 2.0 * limits.steps
    assert limits.trial_seconds(2.001) == math.inf


def test_a_trial_ends_in_time_if_it_takes_all_that_is_left() -> None:
    left = Limits().setup_seconds + 2.0 * Limits().steps
    limits = Limits(seconds_left=left)
    assert limits.ends_in_time(2.0)
    assert not limits.ends_in_time(2.0, 0.001)
    assert not limits.ends_in_time(2.001)
