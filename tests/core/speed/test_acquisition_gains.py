"""Which expected gain is looked for first, and which is too small."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.speed.acquisition import Next, next_point
from autoprec.core.speed.space import Space
from autoprec.core.speed.stopping import Stop
from autoprec.core.speed.trial_results import Outcome, Status, fit_model, possibly_disturbed
from tests.core.speed.machines import (
    BASELINE,
    LIMITS,
    ONE,
    SIZES,
    SPACE,
    TWO,
    at,
    measured,
    ran,
    true_rate,
)


@pytest.mark.parametrize("speed", [1000.0, 1.0])
def test_what_failed_brings_no_larger_batch_within_reach(speed):
    """Eightfold from what ran, be that less than a sample per second."""
    space = Space((Policy.FLOAT32,), (8, 64, 512), memory_formats=("contiguous", "channels_last"))
    failed = Outcome(at(64, memory_format="channels_last"), Status.UNSUPPORTED, reason="no kernel")
    patient = replace(LIMITS, setup_seconds=1e6, cheap_seconds=1e9, gain_per_second=0.0)
    decision = next_point(space, at(8), [*ran([8], speed=speed), failed], patient)
    assert decision.point == at(64)


def test_where_memory_can_be_kept_the_baseline_runs_so_next():
    space = replace(ONE, knobs={"keep_memory": (False, True)})
    plain = at(32, keep_memory=False)
    kept = Next({**plain, "keep_memory": True}, "the baseline with its freed memory kept")
    assert next_point(space, plain, [measured(plain, 500)], LIMITS) == kept


def test_where_nothing_has_run_the_reason_says_so():
    decision = next_point(SPACE, BASELINE, [Outcome(BASELINE, Status.TIMEOUT)], LIMITS)
    assert decision.reason == "nothing has run yet; the smallest batch next"


def test_a_policy_is_tried_and_foreseen_at_the_batch_that_ran():
    space = replace(TWO, batch_sizes=(32, 64))
    history = [Outcome(at(64), Status.TIMEOUT), *ran([32])]
    decision = next_point(space, at(64), history, LIMITS)
    assert (decision.point, decision.expected_rate) == (at(32, "mixed_bfloat16"), 500.0)


def test_of_a_larger_gain_and_a_quicker_trial_the_one_that_gains_more_per_second_is_first():
    history = ran([8, 16], speed=50.0)
    for setup, size in ((0.5, 64), (60.0, 128)):
        limits = replace(LIMITS, setup_seconds=setup, cheap_seconds=1e3)
        assert next_point(ONE, at(8), history, limits).point == at(size)


def test_a_larger_batch_must_promise_what_a_smaller_one_may_lose():
    limits, history = replace(LIMITS, cheap_seconds=0.0), ran([16, 32])
    for share, found in ((0.0, at(64)), (2.0, None)):
        decision = next_point(replace(ONE, batch_share=share), at(16), history, limits)
        assert (decision.point if isinstance(decision, Next) else None) == found


def test_several_steps_a_call_are_tried_only_where_a_step_is_short():
    """A batch of 32 takes 25 ms here, one of 64 takes 50."""
    space = replace(ONE, batch_sizes=(32, 64), knobs={"steps_per_execution": (1, 8)})
    one, eight = {"steps_per_execution": 1}, {"steps_per_execution": 8}
    history = [measured(at(size, **one), 1280.0) for size in (32, 64)]
    decision = next_point(space, at(32, **one), history, LIMITS)
    assert decision.point == at(32, **eight)
    history.append(measured(decision.point, 1279.0))
    assert isinstance(next_point(space, at(32, **one), history, LIMITS), Stop)


def test_steps_a_call_that_were_asked_for_run_at_every_batch():
    space = replace(ONE, batch_sizes=(32, 64), knobs={"steps_per_execution": (8,)})
    eight = {"steps_per_execution": 8}
    history = [measured(at(32, **eight), 1.0)]
    assert next_point(space, at(32, **eight), history, LIMITS).point == at(64, **eight)


def test_a_measurement_in_doubt_weighs_little():
    """Batch 256 ran at three quarters of what the others foresee."""
    rates = {size: size / (4e-3 + 1e-4 * size) for size in (32, 64, 128, 256)}
    slowed = [measured(at(s), rate * (0.75 if s == 256 else 1)) for s, rate in rates.items()]
    assert possibly_disturbed(slowed) == (slowed[-1],)
    mean = fit_model(slowed).predict(at(256)).mean
    assert mean > math.log(rates[256]) - 0.1


def test_of_equal_gains_the_first_is_looked_for():
    space = replace(ONE, memory_formats=("contiguous", "channels_last", "another"))
    history = ran(SIZES)
    found = next_point(space, at(8), history, LIMITS).point
    model = fit_model(history)
    other = {**found, "memory_format": "another"}
    assert model.predict(other) == model.predict(found)
    assert found["memory_format"] == "channels_last"


def test_of_the_fastest_one_thing_is_changed_at_a_time():
    """All that was never tried at once has the widest prediction, and tells of nothing alone."""
    knobs = dict.fromkeys(("fused_optimizer", "cudnn_benchmark"), (False, True))
    space = replace(TWO, memory_formats=("contiguous", "channels_last"), knobs=knobs)
    base = at(**dict.fromkeys(knobs, False))
    history, changed = [], []
    while isinstance(decision := next_point(space, base, history, LIMITS), Next):
        if decision.reason.startswith("expected gain"):
            fastest = max(history, key=lambda outcome: outcome.rate).point
            changed.append(sum(decision.point[name] != value for name, value in fastest.items()))
        history.append(measured(decision.point, true_rate(decision.point)))
    assert changed[:3] == [1, 1, 1]


def test_a_gain_is_over_what_the_model_takes_the_fastest_to_be_not_over_a_lucky_timing():
    lucky = measured(at(64), 1100.0)
    history = [*ran([16, 32, 128], flat=True), lucky, measured(at(64, "mixed_bfloat16"), 1000.0)]
    model = fit_model(history)
    best = max(model.predict(outcome.point).mean for outcome in history)
    assert best < math.log(lucky.rate) - 0.02
    space = replace(TWO, batch_sizes=(16, 32, 64, 128))
    decision = next_point(space, at(32), history, LIMITS)
    gain = model.predict(decision.point).expected_gain(best)
    assert decision.reason == f"expected gain {math.expm1(gain):.1%}"
