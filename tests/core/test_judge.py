"""The judge: what is equal, what drifts, what is rejected, and that tolerance is monotonic."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.judge import (
    LONG_STEPS,
    Evidence,
    SeedRun,
    Tolerance,
    Verdict,
    gate,
    headroom,
    judge,
    metric,
    shadow,
    trajectory,
    wants_later_look,
)
from autoprec.core.shadow import FLIPS
from autoprec.core.trace import NoisePoint, ShadowPoint, Trajectory
from autoprec.errors import UsageError

DEFAULT = Tolerance()
FALLING = tuple(2.0 * 0.95**step for step in range(30))


def run(losses=FALLING, **kwargs) -> Trajectory:
    return Trajectory(losses=tuple(losses), **kwargs)


def times(factor: float, losses=FALLING) -> Trajectory:
    return run(loss * factor for loss in losses)


def drifting(rate: float) -> Trajectory:
    return run(loss * (1 + rate * step) for step, loss in enumerate(FALLING))


def points(deviation: float = 0.0, error: float | None = 0.01) -> tuple[ShadowPoint, ...]:
    return tuple(ShadowPoint(s, 2.0 * (1 + deviation), 2.0, error) for s in (0, 2, 8, 29))


def evidence(candidate: Trajectory, **kwargs) -> Evidence:
    pair = SeedRun(run(), candidate, times(1.0001))
    defaults = {"shadow": points(), "noise": (NoisePoint(0, 2.001, 2.0, 0.01),)}
    return Evidence(**(defaults | kwargs), runs=(pair, pair))


def test_a_run_like_float32_is_equal_and_says_what_it_covers():
    verdict = judge(evidence(times(1.001)), DEFAULT)
    assert verdict.verdict == "equal"
    assert verdict.accepted
    assert verdict.covered == ("shadow at steps 0, 2, 8, 29", "trajectories of 30, 30 steps")
    assert "after 30 steps" in verdict.reason


def test_without_anything_recorded_nothing_is_accepted():
    verdict = judge(Evidence(not_covered=("all",)), DEFAULT)
    assert verdict.verdict == "rejected"
    assert "--proof-seconds" in verdict.reason
    assert verdict.covered == ()
    assert verdict.not_covered == ("all",)
    assert verdict.loss_deviation is None


def test_a_loss_that_is_not_finite_is_rejected_at_its_step():
    verdict = judge(evidence(run((*FALLING[:7], None, *FALLING[8:]))), DEFAULT)
    assert (verdict.verdict, verdict.step) == ("rejected", 7)
    assert "not finite at step 7" in verdict.reason


@pytest.mark.parametrize("loss", [None, math.inf])
def test_a_shadow_that_is_not_finite_is_rejected(loss):
    verdict = judge(Evidence(shadow=(ShadowPoint(8, loss, 1.0, None),)), DEFAULT)
    assert (verdict.verdict, verdict.step) == ("rejected", 8)


def test_two_skipped_steps_are_allowed_and_three_are_not():
    assert judge(evidence(run(skipped=(0, 1))), DEFAULT).accepted
    verdict = judge(evidence(run(skipped=(3, 4, 5))), DEFAULT)
    assert (verdict.verdict, verdict.step, verdict.skipped_steps) == ("rejected", 3, 6)


def test_a_shadow_that_fails_where_training_does_not_is_drift():
    off = run(tuple(1.03 * loss for loss in FALLING))
    verdict = judge(evidence(off, shadow=points(0.05)), DEFAULT)
    assert (verdict.verdict, verdict.step) == ("drift", 0)
    assert not verdict.accepted
    assert verdict.loss_deviation == pytest.approx(0.05)


def alternating(deviation: float, error: float = 0.01) -> tuple[ShadowPoint, ...]:
    """Points whose loss is off as often above as below."""
    above, below = points(deviation, error), points(-deviation, error)
    return (above[0], below[1], above[2], below[3])


def long_run(deviation: float) -> SeedRun:
    """Sixty steps, off by `deviation` from the beginning, and no noise to compare with."""
    losses = tuple(2.0 * 0.95**step for step in range(LONG_STEPS))
    off = tuple((1 + deviation) * loss for loss in losses)
    return SeedRun(Trajectory(losses), Trajectory(off))


@pytest.mark.parametrize(
    ("shadow_", "after", "verdict"),
    [
        (alternating(0.05), 0.02, "equal"),
        (alternating(0.05), 0.06, "drift"),  # by then it shows
        (alternating(0.05, error=0.9), 0.02, "drift"),  # its gradients are another's
        (alternating(0.11), 0.02, "drift"),  # too far off at the same weights
        (points(0.05), 0.02, "drift"),  # always above: no noise, but a bias
    ],
)
def test_losses_off_in_both_directions_are_noise_where_a_longer_run_agrees(shadow_, after, verdict):
    found = judge(Evidence(shadow=shadow_, runs=(long_run(after),)), DEFAULT)
    assert found.verdict == verdict
    assert ("after 60 steps" in found.reason) is (verdict == "equal" or after == 0.06)


@pytest.mark.parametrize(("leap", "verdict"), [(0.07, "equal"), (0.09, "drift")])
def test_single_steps_tell_what_their_mean_does_not(leap, verdict):
    agreed = long_run(0.0)
    losses = [(1 + leap * (-1) ** i) * x for i, x in enumerate(agreed.reference.losses)]
    leaping = replace(agreed, candidate=Trajectory(tuple(losses)))
    found = judge(Evidence(shadow=alternating(0.05), runs=(leaping,)), DEFAULT)
    assert found.verdict == verdict
    assert found.accepted or "single steps by then 9 %" in found.reason


@pytest.mark.parametrize(("after", "verdict"), [(0.02, "equal"), (0.06, "drift")])
def test_noise_that_moves_float32_far_excuses_what_training_takes_away(after, verdict):
    noisy = tuple(NoisePoint(p.step, 2.0 * 1.03, 2.0, 0.01) for p in points())
    found = judge(Evidence(points(0.08), noise=noisy, runs=(long_run(after),)), DEFAULT)
    assert found.verdict == verdict
    assert "after 60 steps" in found.reason
    short = judge(evidence(run(), shadow=points(0.08), noise=noisy), DEFAULT)
    assert short.accepted  # too short a run to say


@pytest.mark.parametrize(
    ("roundoff", "apart", "accepted"),
    [(2.0**-8, 1.4, True), (2.0**-8, 1.6, False), (2.0**-11, 1.4, False), (2.0**-11, 0.1, True)],
)
def test_a_gradient_that_noise_of_the_formats_size_explains_is_no_drift(roundoff, apart, accepted):
    noise = 0.01
    noisy = tuple(loss + 2.0 * noise for loss in FALLING)
    slack = noise + DEFAULT.trajectory_slack
    ours = tuple(loss + 2.0 * apart * slack for loss in FALLING)
    off = SeedRun(Trajectory(FALLING), Trajectory(ours), Trajectory(noisy))
    found = Evidence(shadow=points(0.0, error=0.9), runs=(off,), roundoff=roundoff)
    assert judge(found, DEFAULT).accepted is accepted


def test_a_gradient_that_is_far_off_or_not_finite_fails_the_shadow():
    assert "gradient" in shadow(points(error=0.6), (), DEFAULT).problem
    far = shadow(points(error=None), (), DEFAULT)
    assert not far.passed
    assert far.gradient_error is None


@pytest.mark.parametrize(
    ("steps", "deviation", "error", "passes"),
    [
        ((8,), 0.019, 0.01, True),
        ((8,), 0.021, 0.01, False),  # more than twice what is allowed
        ((2, 8), 0.019, 0.01, False),
        ((29,), 0.019, 0.01, False),  # nothing was seen after it
        ((29,), 0.0, 0.9, True),
        ((29,), 0.0, 1.1, False),
    ],
)
def test_one_checkpoint_a_little_off_was_passed_through(steps, deviation, error, passes):
    off = {p.step: p for p in points(deviation, error)}
    seen = tuple(off[p.step] if p.step in steps else p for p in points())
    assert shadow(seen, (), DEFAULT).passed is passes
    assert not shadow(seen[-2:], (), DEFAULT).passed  # too few to say


@pytest.mark.parametrize(("after", "verdict"), [(0.02, "equal"), (0.06, "drift")])
def test_where_noise_destroys_float32s_gradients_a_longer_run_decides(after, verdict):
    noisy = tuple(NoisePoint(p.step, 2.0, 2.0, 0.9) for p in points())
    near = points(0.001, error=0.9)
    found = judge(Evidence(near, noise=noisy, runs=(long_run(after),)), DEFAULT)
    assert found.verdict == verdict
    far = judge(Evidence(points(0.03, error=0.9), noise=noisy, runs=(long_run(0.02),)), DEFAULT)
    assert not far.accepted  # its losses are not near


def test_a_finer_format_has_less_of_the_loss_tolerance():
    float16 = 2.0**-11
    assert shadow(points(0.009), (), DEFAULT).passed
    assert not shadow(points(0.009), (), DEFAULT, float16).passed
    assert shadow(points(0.007), (), DEFAULT, float16).passed


def test_noise_never_excuses_another_gradient_at_most_checkpoints():
    noise = tuple(NoisePoint(s, 2.0, 2.0, 0.4) for s in (0, 2, 8, 29))  # float32 bears it
    once = tuple(replace(p, gradient_error=1.1 if p.step == 8 else 0.4) for p in points())
    thrice = tuple(replace(p, gradient_error=0.4 if p.step == 8 else 0.7) for p in points())
    assert shadow(once, noise, DEFAULT).passed
    assert "at most of 4 checkpoints" in shadow(thrice, noise, DEFAULT).problem
    assert shadow(thrice[:2], noise, DEFAULT).passed  # too few to say


def test_noise_widens_what_the_shadow_allows():
    noisy = (NoisePoint(0, 2.1, 2.0, 0.01),)
    assert not shadow(points(0.05), (), DEFAULT).passed
    assert shadow(points(0.05), noisy, DEFAULT).passed


def test_a_trajectory_that_leaves_is_rejected_at_the_step_where_it_parts():
    verdict = judge(evidence(drifting(0.02)), DEFAULT)
    assert verdict.verdict == "rejected"
    assert 0 < verdict.step < 10


def test_chaos_that_noise_causes_too_is_not_blamed_on_the_precision():
    chaotic = SeedRun(run(), drifting(0.02), drifting(-0.015))
    assert trajectory((chaotic,), DEFAULT).passed


def test_noise_that_breaks_float32_excuses_everything_finite():
    broken = SeedRun(run(), drifting(0.02), run((*FALLING[:10], None, *FALLING[11:])))
    assert trajectory((broken,), DEFAULT).passed


def test_without_a_noisy_run_only_the_slack_is_allowed():
    check = trajectory((SeedRun(run(), drifting(0.02)),), DEFAULT)
    assert not check.passed
    assert check.noise == 0.0


def test_a_trajectory_of_less_than_five_steps_is_not_judged():
    assert not trajectory((SeedRun(run(), run(FALLING[:4])),), DEFAULT).judged


def test_float32_that_breaks_by_itself_proves_nothing():
    broken = SeedRun(run((1.0, None)), run((1.0, 1.0)))
    verdict = judge(Evidence(runs=(broken,)), DEFAULT)
    assert verdict.verdict == "rejected"
    assert "float32 itself" in verdict.reason


def test_the_users_metric_is_compared_over_seeds():
    good = [SeedRun(run(metric=0.9), run(metric=0.89), run(metric=0.88)) for _ in range(2)]
    bad = [SeedRun(run(metric=0.9), run(metric=0.7), run(metric=0.9)) for _ in range(2)]
    assert metric(good, DEFAULT).passed
    assert "0.7" in metric(bad, DEFAULT).problem
    assert judge(Evidence(runs=tuple(bad)), DEFAULT).verdict == "rejected"
    assert "evaluate(model)" in judge(Evidence(runs=tuple(good)), DEFAULT).covered


def test_metrics_after_different_numbers_of_steps_are_not_compared():
    assert not metric([SeedRun(run(metric=0.9), run(FALLING[:9], metric=0.1))], DEFAULT).judged


def test_losses_around_zero_do_not_divide_by_nothing():
    zeros = SeedRun(run((0.0,) * 10), run((0.0,) * 10), run((0.0,) * 10))
    assert trajectory((zeros,), DEFAULT).passed
    assert shadow((ShadowPoint(0, 0.0, 0.0, 0.0),), (), DEFAULT).passed


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_a_tolerance_must_be_a_positive_factor(factor):
    with pytest.raises(UsageError, match="factor above 0"):
        DEFAULT.scaled(factor)


losses = st.lists(
    st.one_of(st.none(), st.floats(-1e6, 1e6, allow_nan=False)), min_size=1, max_size=12
)
trajectories = st.builds(
    run,
    losses,
    skipped=st.lists(st.integers(0, 11), max_size=4).map(tuple),
    metric=st.none() | st.floats(-10, 10),
)
reals = st.floats(-1e6, 1e6, allow_nan=False)
errors = st.none() | st.floats(0, 1e6)
anything = st.builds(
    Evidence,
    shadow=st.lists(
        st.builds(ShadowPoint, st.integers(0, 30), st.none() | reals, reals, errors), max_size=4
    ).map(tuple),
    noise=st.lists(
        st.builds(NoisePoint, st.integers(0, 30), st.none() | reals, reals, errors), max_size=4
    ).map(tuple),
    runs=st.lists(
        st.builds(SeedRun, trajectories, trajectories, st.none() | trajectories), max_size=2
    ).map(tuple),
)
ORDER = ("equal", "drift", "rejected")


@given(anything, st.floats(0.01, 100), st.floats(1, 100))
def test_more_tolerance_never_rejects_more(found, factor, more):
    strict = judge(found, DEFAULT.scaled(factor))
    wide = judge(found, DEFAULT.scaled(factor * more))
    assert ORDER.index(wide.verdict) <= ORDER.index(strict.verdict)


@given(anything)
def test_every_verdict_is_plain_and_comes_back_as_it_was(found):
    verdict = judge(found, DEFAULT)
    text = json.dumps(to_plain(verdict), allow_nan=False)
    assert from_plain(Verdict, json.loads(text)) == verdict
    assert verdict.reason


@given(st.integers(0, 2**31))
def test_the_gate_of_float32_allows_any_skips(skips):
    wide = replace(DEFAULT, skipped=2**31)
    assert gate([run(skipped=tuple(range(min(skips, 30))))], wide).passed


def test_a_finer_format_answers_for_less_noise():
    noisy = (NoisePoint(0, 2.1, 2.0, 0.3),)
    assert shadow(points(0.15), noisy, DEFAULT).passed
    finer = shadow(points(0.15), noisy, DEFAULT, roundoff=2.0**-11)
    assert not finer.passed
    assert finer.noise == pytest.approx(0.05 * FLIPS)
    assert finer.gradient_noise == pytest.approx(0.3 * FLIPS)


def test_a_choice_that_noise_flips_may_flip_in_a_finer_format_too():
    flipped = (NoisePoint(0, 2.0, 2.0, 0.001), NoisePoint(29, 1.86, 2.0, 0.646))
    same = (ShadowPoint(0, 2.0, 2.0, 0.001), ShadowPoint(29, 1.86, 2.0, 0.647))
    assert shadow(same, flipped, DEFAULT, roundoff=2.0**-11).passed


def growing(*largest: float | None) -> tuple[ShadowPoint, ...]:
    steps = (0, 2, 8, 29)
    return tuple(
        ShadowPoint(step, 1.0, 1.0, 0.0, value, value is None)
        for step, value in zip(steps, largest, strict=True)
    )


def test_float16_numbers_that_grow_towards_the_limit_are_drift():
    points_ = growing(1000.0, 2000.0, 5000.0, 30000.0)
    assert "overflows by step" in headroom(points_).problem
    verdict = judge(Evidence(shadow=points_), DEFAULT)
    assert (verdict.verdict, verdict.step) == ("drift", 29)


@pytest.mark.parametrize("largest", [(10.0, 2000.0, 5000.0, None), (10.0, 20.0, None, 30.0)])
def test_float16_numbers_that_became_infinite_are_drift(largest):
    step = 29 if largest[-1] is None else 8
    assert f"is infinite at step {step}" in headroom(growing(*largest)).problem


def later(*largest: float | None) -> tuple[ShadowPoint, ...]:
    steps = (34, 39, 44, 49, 54, 59)
    return tuple(
        ShadowPoint(step, 1.0, 1.0, 0.0, value, value is None)
        for step, value in zip(steps, largest, strict=True)
    )


@pytest.mark.parametrize(
    ("largest", "wanted"),
    [
        ((824.0, 262.0, 421.0, 734.0), True),  # they leap, not far from the limit
        ((85.0, 88.0, 144.0, 1126.0), True),  # they grow
        ((824.0, 822.0, 810.0, 830.0), False),
        ((2.0, 16.0, 1.0, 9.0), False),
        ((None, None, None, None), False),
    ],
)
def test_more_is_looked_at_where_four_checkpoints_leave_a_doubt(largest, wanted):
    assert wants_later_look(growing(*largest)) is wanted


def test_a_trend_is_not_taken_for_leaps_between_batches():
    early = growing(85.0, 88.0, 144.0, 1126.0)
    settled = later(1820.0, 1900.0, 2244.0, 2310.0, 2100.0, 2240.0)
    assert headroom(early, settled).passed
    leaping = headroom(growing(140.0, 998.0, 126.0, 320.0), later(439, 429, 137, 67, 169, 236))
    assert "varies from 67 to 998" in leaping.problem


def test_numbers_that_stopped_growing_are_no_drift():
    early = growing(85.0, 88.0, 144.0, 1126.0)
    assert not headroom(early).passed
    assert headroom(early, later(1800.0, 2200.0, 2400.0, 2300.0, 2100.0, 2244.0)).passed
    assert not headroom(early, later(2e3, 3e3, 4e3, 8e3, 1.6e4, 4e4)).passed
    assert not headroom(early, later(2e3, 3e3, 2e3, None, 2e3, 3e3)).passed
    restless = headroom(early, later(300.0, 9e3, 200.0, 2e4, 400.0, 150.0))
    assert "varies from" in restless.problem


@pytest.mark.parametrize(
    "largest",
    [
        (1.0, 2.0, 2.5, 3.0),  # far from the limit
        (9e3, 1e4, 9.5e3, 9e3),  # near the limit, but quiet
        (1.0, 40.0, 20.0, 100.0),  # restless, but far from it
        (None, None, None, None),  # infinite from the start, as masks are
    ],
)
def test_other_large_numbers_are_left_to_the_other_tests(largest):
    assert headroom(growing(*largest)).passed


def test_growth_is_judged_from_three_checkpoints_on():
    assert not headroom(growing(1.0, 2e4, 3e4, 6e4)[:3]).judged


def test_where_noise_alone_breaks_every_gradient_it_excuses_nothing():
    noise = tuple(NoisePoint(step, 3.0, 2.0, 1.0) for step in (0, 2, 8, 29))
    excused = (NoisePoint(0, 3.0, 2.0, 0.01), NoisePoint(2, 3.0, 2.0, 0.01), *noise[2:])
    assert not judge(evidence(run(), shadow=points(0.2), noise=noise), DEFAULT).accepted
    assert judge(evidence(run(), shadow=points(0.2), noise=excused), DEFAULT).accepted


def test_a_converged_gradient_is_excused_where_noise_moves_it_too():
    noise = (NoisePoint(0, 2.0, 2.0, 0.01), NoisePoint(29, 2.0, 2.0, 0.8))
    late = (ShadowPoint(0, 2.0, 2.0, 0.01), ShadowPoint(29, 2.0, 2.0, 2.1))
    early = (ShadowPoint(0, 2.0, 2.0, 2.1), ShadowPoint(29, 2.0, 2.0, 0.01))
    assert shadow(late, noise, DEFAULT).passed
    assert "step 0" in shadow(early, noise, DEFAULT).problem


def test_a_gradient_that_is_lost_is_never_excused_by_noise_elsewhere():
    noise = (NoisePoint(0, 2.0, 2.0, 0.01), NoisePoint(29, 2.0, 2.0, 3.0))
    assert not shadow((ShadowPoint(0, 2.0, 2.0, 1.0),), noise, DEFAULT).passed


def test_trajectories_alone_are_judged_too():
    verdict = judge(Evidence(runs=(SeedRun(run(), times(1.001), times(1.001)),)), DEFAULT)
    assert verdict.accepted
    assert verdict.loss_deviation is None
    assert "after 30 steps" in verdict.reason


def test_a_deviation_that_is_passed_through_is_left_to_the_trajectories():
    def deviating(*steps: int) -> tuple[ShadowPoint, ...]:
        return tuple(
            ShadowPoint(step, 2.03 if step in steps else 2.0, 2.0, 0.01) for step in (0, 2, 8, 29)
        )

    assert shadow(deviating(0), (), DEFAULT).passed
    assert not shadow(deviating(0, 2), (), DEFAULT).passed
    assert not shadow(deviating(29), (), DEFAULT).passed
    assert not shadow(deviating(0)[:2], (), DEFAULT).passed


def test_float16_numbers_that_vary_much_near_the_limit_are_drift():
    check = headroom(growing(1300.0, 9000.0, 700.0, 140.0))
    assert "varies from 140 to 9e+03" in check.problem
    assert headroom(growing(None, 9000.0, 700.0, 140.0)).passed


def test_what_is_far_beyond_the_limit_is_not_passed_through():
    points_ = tuple(
        ShadowPoint(step, 2.2 if step == 2 else 2.0, 2.0, 0.01) for step in (0, 2, 8, 29)
    )
    assert not shadow(points_, (), DEFAULT).passed


def test_a_finer_format_has_half_of_the_loss_tolerance():
    assert shadow(points(0.008), (), DEFAULT).passed
    assert not shadow(points(0.008), (), DEFAULT, roundoff=2.0**-11).passed
