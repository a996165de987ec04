"""A constant in the loss changes no training, so it changes no verdict."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoprec.core.numerics.judging import check_first_steps, judge, needs_longest_run
from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.loss_origin import above_origin, loss_origin
from autoprec.core.numerics.traces import BufferUpdate, NoisyStep, StepComparison, Trajectory
from autoprec.core.numerics.verdict import ProofEvidence
from tests.core.evidence import DEFAULT, FALLING, evidence, points, run, times

MEANS = replace(points()[0], mean_loss=3.0, mean_reference=2.5)


@pytest.mark.parametrize(
    ("losses", "origin"),
    [
        ((), 0.0),
        ((None, math.inf, math.nan), 0.0),
        ((2.5, 2.5), 0.0),  # nothing is known of how it varies
        ((2.3, 0.5), 0.0),
        ((2.3, 0.0), 0.0),
        ((2.3, 1.2), 0.1),  # the smallest is 1.1 above it, as much as the loss varies
        ((2.3, None, 1.2, math.inf), 0.1),
        ((12.3, 10.5), 8.7),
        ((102.3, 100.5), 90.45),  # it counts as a tenth of what it is
        ((-1.0, -3.0), -5.0),
        ((1.0, -1.0), -3.0),
        ((-100.0, -101.0), -111.1),
    ],
)
def test_the_origin_is_as_far_below_the_smallest_loss_as_the_loss_varies(losses, origin):
    assert loss_origin(losses) == pytest.approx(origin)
    assert loss_origin(reversed(losses)) == pytest.approx(origin)


def shifted(known: ProofEvidence, constant: float) -> ProofEvidence:
    """The same training, with a loss that has a constant more."""

    def plus(losses):
        return tuple(None if loss is None else loss + constant for loss in losses)

    def trained(each):
        return None if each is None else replace(each, losses=plus(each.losses))

    def paired(each):
        return SeedRun(trained(each.reference), trained(each.candidate), trained(each.noisy))

    return replace(
        known,
        comparisons=tuple(
            replace(p, loss=p.loss + constant, reference=p.reference + constant)
            for p in known.comparisons
        ),
        noise=tuple(
            replace(p, loss=p.loss + constant, reference=p.reference + constant)
            for p in known.noise
        ),
        runs=tuple(paired(each) for each in known.runs),
        float32_losses=plus(FALLING),
    )


def test_all_losses_are_counted_from_the_origin_and_once():
    whole = ProofEvidence(
        comparisons=(MEANS,),
        noise=(NoisyStep(0, 2.25, 2.0),),
        late_comparisons=(replace(points()[1], loss=None),),
        late_noise=(NoisyStep(59, None, 1.0),),
        runs=(SeedRun(run((0.5,)), run((2.5,))),),
        long_runs=(SeedRun(run((1.0,)), run((1.5,)), run((1.25,))),),
        candidate_run=Trajectory((3.0, None), skipped=(1,)),
        float32_losses=(1.0, -1.0),
    )
    found = above_origin(whole)
    assert found.loss_origin == -3.0
    (point,), (late,) = found.comparisons, found.late_comparisons
    assert (point.loss, point.reference) == (MEANS.loss + 3, MEANS.reference + 3)
    assert (point.mean_loss, point.mean_reference) == (6.0, 5.5)
    assert (late.loss, late.reference, late.mean_loss) == (None, points()[1].reference + 3, None)
    assert found.noise == (NoisyStep(0, 5.25, 5.0),)
    assert found.late_noise == (NoisyStep(59, None, 4.0),)
    assert found.runs == (SeedRun(run((3.5,)), run((5.5,))),)
    assert found.long_runs == (SeedRun(run((4.0,)), run((4.5,)), run((4.25,))),)
    assert found.candidate_run == Trajectory((6.0, None), skipped=(1,))
    assert found.float32_losses == (4.0, 2.0)
    assert above_origin(found) == found


def test_a_loss_that_falls_further_in_a_longer_run_stays_above_the_origin():
    short = ProofEvidence(float32_losses=(10.0, 8.0))
    assert above_origin(short).loss_origin == 6.0
    further = SeedRun(run((10.0, 8.0, 5.5)), run((10.0, 8.0, 5.5)))
    assert above_origin(replace(short, long_runs=(further,))).loss_origin == 1.0
    assert above_origin(replace(short, runs=(further,))).loss_origin == 1.0


def test_nothing_changes_where_the_loss_comes_near_zero():
    known = replace(evidence(times(1.001)), float32_losses=FALLING)
    assert above_origin(known) == known
    assert judge(known, DEFAULT) == judge(evidence(times(1.001)), DEFAULT)


@pytest.mark.parametrize("constant", [20.0, -1.0, -50.0])
def test_a_constant_hides_no_broken_training(constant):
    broken = evidence(times(1.6))
    assert judge(broken, DEFAULT).verdict == "rejected"
    found = judge(shifted(broken, constant), DEFAULT)
    assert found.verdict == "rejected"
    assert found.reason.endswith(f"; shares are of the loss above {found.loss_origin:.3g}")
    assert found.loss_origin == pytest.approx(loss_origin([x + constant for x in FALLING]))
    assert found.first_loss == pytest.approx(FALLING[0] + constant)
    tail = FALLING[-len(FALLING) // 5 :]
    assert found.last_loss == pytest.approx(sum(tail) / len(tail) + constant)


@pytest.mark.parametrize("constant", [20.0, -50.0])
def test_a_share_of_a_buffers_change_is_not_told_as_one_of_the_loss(constant):
    other = (BufferUpdate("sums", 0.5),)
    wrong = tuple(replace(point, buffers=other) for point in points())
    found = judge(shifted(evidence(times(1.0), comparisons=wrong), constant), DEFAULT)
    assert (found.verdict, found.loss_origin != 0.0) == ("drift", True)
    assert found.reason.endswith("by 50 % of the change")


@pytest.mark.parametrize("constant", [20.0, -1.0, -FALLING[0], -FALLING[15], -50.0])
def test_a_constant_accuses_no_training_that_is_like_float32(constant):
    healthy = evidence(times(1.004), comparisons=points(0.004))
    assert judge(healthy, DEFAULT).verdict == "equal"
    found = judge(shifted(healthy, constant), DEFAULT)
    assert found.verdict == "equal"
    assert found.first_loss == pytest.approx(FALLING[0] + constant)
    assert (found.loss_deviation, found.trajectory_deviation) < (0.01, 0.05)


def test_an_origin_goes_without_saying_where_no_share_is_told():
    found = judge(shifted(evidence(run((*FALLING[:7], None, *FALLING[8:]))), 20.0), DEFAULT)
    assert (found.verdict, found.step) == ("rejected", 7)
    assert "shares" not in found.reason


def test_what_needs_more_steps_depends_on_no_constant():
    steps_ = points(0.08)
    known = ProofEvidence(comparisons=steps_, float32_losses=FALLING)
    assert not check_first_steps(known, DEFAULT).passed
    moved = shifted(known, 4.0)
    assert not check_first_steps(moved, DEFAULT).passed
    growing = ProofEvidence(
        comparisons=points(0.0), late_comparisons=(StepComparison(59, 0.506, 0.5, 0.01),)
    )
    assert needs_longest_run(growing, DEFAULT)
    far = replace(
        growing,
        comparisons=tuple(
            replace(p, loss=p.loss + 4, reference=p.reference + 4) for p in points(0.0)
        ),
        late_comparisons=(StepComparison(59, 4.506, 4.5, 0.01),),
    )
    assert not needs_longest_run(far, DEFAULT)
    assert needs_longest_run(replace(far, float32_losses=(4.6, 4.5)), DEFAULT)
