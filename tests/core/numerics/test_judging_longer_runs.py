"""What longer runs decide: what single steps leave open, and whether one is needed at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.numerics.judging import (
    LONG_STEPS,
    check_calibrated,
    judge,
    needs_longest_run,
    stays_close,
)
from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.single_step import NOISE_ROUNDOFF
from autoprec.core.numerics.traces import NoisyStep, StepComparison, Trajectory
from autoprec.core.numerics.verdict import ProofEvidence
from tests.core.evidence import DEFAULT, FALLING, evidence, points, run, times


def alternating(deviation: float, error: float = 0.01) -> tuple[StepComparison, ...]:
    """Points whose loss is off as often above as below."""
    above, below = points(deviation, error), points(-deviation, error)
    return (above[0], below[1], above[2], below[3])


def long_run(deviation: float) -> SeedRun:
    """Sixty steps, off by `deviation` from the beginning, and no noise to compare with."""
    losses = tuple(2.0 * 0.95**step for step in range(LONG_STEPS))
    off = tuple((1 + deviation) * loss for loss in losses)
    return SeedRun(Trajectory(losses), Trajectory(off))


@pytest.mark.parametrize(
    ("steps_", "after", "verdict"),
    [
        (alternating(0.05), 0.02, "equal"),
        (alternating(0.05), 0.06, "drift"),  # by then it shows
        (alternating(0.05, error=0.9), 0.02, "drift"),  # its gradients are another's
        (alternating(0.11), 0.02, "drift"),  # too far off at the same weights
        (points(0.05), 0.02, "drift"),  # always above: no noise, but a bias
    ],
)
def test_losses_off_in_both_directions_are_noise_where_a_longer_run_agrees(steps_, after, verdict):
    found = judge(ProofEvidence(comparisons=steps_, runs=(long_run(after),)), DEFAULT)
    assert found.verdict == verdict
    assert found.trajectory_deviation == pytest.approx(after)
    assert found.loss_deviation == pytest.approx(max(abs(p.loss / p.reference - 1) for p in steps_))
    assert found.gradient_error == max(p.gradient_error for p in steps_)
    assert (found.steps, found.step) == (LONG_STEPS, None if verdict == "equal" else 0)
    assert ("after 60 steps" in found.reason) is (verdict == "equal" or after == 0.06)


@pytest.mark.parametrize(("leap", "verdict"), [(0.07, "equal"), (0.09, "drift")])
def test_single_steps_tell_what_their_mean_does_not(leap, verdict):
    agreed = long_run(0.0)
    losses = [(1 + leap * (-1) ** i) * x for i, x in enumerate(agreed.reference.losses)]
    leaping = replace(agreed, candidate=Trajectory(tuple(losses)))
    found = judge(ProofEvidence(comparisons=alternating(0.05), runs=(leaping,)), DEFAULT)
    assert found.verdict == verdict
    assert found.accepted or "single steps by then 9 %" in found.reason


@pytest.mark.parametrize(("after", "verdict"), [(0.02, "equal"), (0.06, "drift")])
def test_noise_that_moves_float32_far_excuses_what_training_takes_away(after, verdict):
    noisy = tuple(NoisyStep(p.step, 2.0 * 1.03, 2.0, 0.02) for p in points())
    found = judge(ProofEvidence(points(0.08), noise=noisy, runs=(long_run(after),)), DEFAULT)
    assert found.verdict == verdict
    assert found.trajectory_deviation == pytest.approx(after)
    assert found.loss_deviation == pytest.approx(0.08)
    assert (found.loss_null, found.gradient_null) == (pytest.approx(0.03), 0.02)
    assert found.gradient_error == 0.01
    assert (found.steps, found.step) == (LONG_STEPS, None if verdict == "equal" else LONG_STEPS)
    assert "after 60 steps" in found.reason
    short = judge(evidence(run(), comparisons=points(0.08), noise=noisy), DEFAULT)
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
    found = ProofEvidence(comparisons=points(0.0, error=0.9), runs=(off,), roundoff=roundoff)
    assert judge(found, DEFAULT).accepted is accepted


@pytest.mark.parametrize(("after", "verdict"), [(0.02, "equal"), (0.06, "drift")])
def test_where_noise_destroys_float32s_gradients_a_longer_run_decides(after, verdict):
    noisy = tuple(NoisyStep(p.step, 2.0, 2.0, 0.9) for p in points())
    near = points(0.001, error=0.9)
    found = judge(ProofEvidence(near, noise=noisy, runs=(long_run(after),)), DEFAULT)
    assert found.verdict == verdict
    far = judge(
        ProofEvidence(points(0.03, error=0.9), noise=noisy, runs=(long_run(0.02),)), DEFAULT
    )
    assert not far.accepted  # its losses are not near


@pytest.mark.parametrize(("steps", "decides"), [(48, True), (47, False)])
def test_four_fifths_of_a_long_run_decide(steps, decides):
    def cut(deviation: float) -> SeedRun:
        whole = long_run(deviation)
        return SeedRun(
            Trajectory(whole.reference.losses[:steps]), Trajectory(whole.candidate.losses[:steps])
        )

    both = judge(ProofEvidence(comparisons=alternating(0.05), runs=(cut(0.02),)), DEFAULT)
    assert both.accepted is decides  # only a long run clears it
    noisy = tuple(NoisyStep(p.step, 2.0 * 1.03, 2.0, 0.01) for p in points())
    far = judge(ProofEvidence(points(0.08), noise=noisy, runs=(cut(0.06),)), DEFAULT)
    assert far.accepted is not decides  # only a long run convicts it


def test_wrong_gradients_near_the_limit_are_cleared_by_no_long_run():
    steps = points(0.015, error=0.9)
    found = judge(ProofEvidence(comparisons=steps, runs=(long_run(0.02),)), DEFAULT)
    assert found.verdict == "drift"
    assert found.reason == (
        "it trains, but not like float32: at the same weights and batch of step 0 its loss is "
        "1.5 % away from float32's; 1 % is allowed; after 60 steps it is 2 % away, and single "
        "steps by then 2 %; float32's goes from 2 to 0.13"
    )


@pytest.mark.parametrize(("error", "accepted"), [(0.5, True), (0.51, False)])
def test_gradients_are_right_up_to_what_is_allowed(error, accepted):
    steps = (*points()[:2], *points(0.015, error)[2:])
    off = SeedRun(run(), times(1.004))
    assert judge(ProofEvidence(comparisons=steps, runs=(off, off)), DEFAULT).accepted is accepted


def test_what_noise_excuses_says_how_training_went_on():
    noisy = tuple(NoisyStep(p.step, 2.0 * 1.03, 2.0, 0.01) for p in points())
    found = judge(ProofEvidence(points(0.08), noise=noisy, runs=(long_run(0.06),)), DEFAULT)
    assert found.reason == (
        "it trains, but not like float32: its loss is 8 % away at the same weights; small noise "
        "does the same, but training averages noise out; after 60 steps it is 6 % away, and single "
        "steps by then 6 %; float32's goes from 2 to 0.13"
    )
    untrained = judge(ProofEvidence(points(0.08), noise=noisy), DEFAULT)
    assert untrained.verdict == "equal at single steps"


@pytest.mark.parametrize(
    ("deviation", "error", "undecided"),
    [
        (0.015, 0.9, "both_signs"),
        (0.015, 0.5, "near_limit"),  # gradients that are right are no reason for a longer run
        (0.015, 0.0, "near_limit"),
        (0.03, 0.9, ""),
    ],
)
def test_where_noise_excuses_nothing_a_long_run_may_clear_gradients(deviation, error, undecided):
    noise = tuple(NoisyStep(p.step, 2.0, 2.0, 0.9) for p in points())
    found = check_calibrated(points(deviation, error), noise, DEFAULT, NOISE_ROUNDOFF)
    assert not found.passed
    assert found.undecided == undecided


NOISY = tuple(NoisyStep(p.step, 2.0 * 1.03, 2.0, 0.01) for p in points())
GROWING = tuple(
    StepComparison(step, 2.0 * (1 + share), 2.0, 0.01)
    for step, share in ((59, 0.004), (119, 0.007))
)


@pytest.mark.parametrize(
    ("found", "needed"),
    [
        (evidence(run()), False),
        (ProofEvidence(comparisons=alternating(0.05)), True),  # undecided
        (ProofEvidence(comparisons=points(0.08), noise=NOISY), True),  # excused by noise
        (ProofEvidence(comparisons=points(0.08)), False),
        (ProofEvidence(comparisons=points(0.03), noise=NOISY), False),
        (ProofEvidence(comparisons=points(0.015), roundoff=2.0**-11), True),  # twice 0.75 %
        (ProofEvidence(comparisons=points(0.019), roundoff=2.0**-11), False),
        (ProofEvidence(comparisons=points(), late_comparisons=GROWING), True),
        (ProofEvidence(comparisons=points(), late_comparisons=GROWING[:1]), False),
        (ProofEvidence(comparisons=(*points(), *GROWING)), True),
    ],
)
def test_the_longest_run_is_for_what_is_undecided_or_growing(found, needed):
    assert needs_longest_run(found, DEFAULT) is needed


def test_a_second_seed_is_for_trainings_that_do_not_stay_close():
    leaping = run((1 + 0.02 * (-1) ** step) * loss for step, loss in enumerate(FALLING))
    assert stays_close(SeedRun(run(), times(1.004)), DEFAULT)
    assert not stays_close(SeedRun(run(), times(1.006)), DEFAULT)
    assert not stays_close(SeedRun(run(), leaping), DEFAULT)  # close at its end, not on the way
    assert not stays_close(SeedRun(run(), run(FALLING[:4])), DEFAULT)  # too short to say


def test_a_candidates_own_longer_run_must_stay_finite():
    losses = tuple(2.0 * 0.95**step for step in range(120))
    lost = Trajectory((*losses[:70], None, *losses[71:]))
    found = judge(replace(evidence(times(1.001)), candidate_run=lost), DEFAULT)
    assert (found.verdict, found.step) == ("rejected", 70)
    assert found.reason == "the loss is not finite at step 70"
    whole = replace(evidence(times(1.001)), candidate_run=Trajectory(losses))
    assert judge(whole, DEFAULT).accepted
