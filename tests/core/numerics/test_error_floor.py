"""Error floors: rounding errors that stay as large while the loss falls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.numerics.judging import judge
from autoprec.core.numerics.late_failures import check_error_floor
from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.tolerance import Check
from autoprec.core.numerics.traces import NoisyStep, StepComparison, Trajectory
from autoprec.core.numerics.verdict import ProofEvidence
from tests.core.evidence import DEFAULT, evidence, times

CURVE = tuple(2.0 / (1 + step) for step in range(240))


def comparisons_at(excess, steps=(8, 29, 59, 119)) -> tuple[StepComparison, ...]:
    """Marks on the curve at which a loss is above float32's by what `excess` says of it."""
    return tuple(StepComparison(s, CURVE[s] + excess(CURVE[s]), CURVE[s], 0.01) for s in steps)


QUIET = tuple(NoisyStep(step, CURVE[step], CURVE[step]) for step in (8, 29, 59, 119))
SHORTER = SeedRun(Trajectory(CURVE[:120]), Trajectory(tuple(loss + 1e-3 for loss in CURVE[:120])))


@pytest.mark.parametrize(
    ("excess", "passed"),
    [
        (lambda loss: 1e-3, False),  # 0.4 % of the loss at step 8, 6 % at step 119
        (lambda loss: 1e-5, True),  # next to nothing of it
        (lambda loss: 0.009 * loss, True),  # always the same share
        (lambda loss: -1e-3, True),
        (lambda loss: 1e-2 * loss**2, True),  # it goes before the loss does
    ],
)
def test_an_error_that_stays_while_the_loss_falls_is_a_floor(excess, passed):
    found = check_error_floor(comparisons_at(excess), QUIET, SHORTER, DEFAULT)
    assert found.passed is passed
    assert passed or "stays constant while the loss falls" in found.problem


def test_a_floor_is_read_from_means_where_single_batches_hide_it():
    points = comparisons_at(lambda loss: 1e-3)
    hidden = [replace(p, loss=p.reference + e) for p, e in zip(points, (1, -3, 2, -2), strict=True)]
    assert check_error_floor(hidden, QUIET, SHORTER, DEFAULT).passed
    means = {p.step: {"mean_loss": p.loss, "mean_reference": p.reference} for p in points}
    shown = [replace(p, **means[p.step]) for p in hidden]
    found = check_error_floor(shown, QUIET, SHORTER, DEFAULT)
    assert found.problem == check_error_floor(points, QUIET, SHORTER, DEFAULT).problem
    assert not found.passed
    none = {"mean_loss": None}  # not finite on one of the further batches
    assert check_error_floor([replace(p, **none) for p in shown], QUIET, SHORTER, DEFAULT).passed


@pytest.mark.parametrize(
    ("errors", "passed"),
    [
        ((0.0, 0.0, 0.0, 1e-4), False),  # ten standard errors
        ((0.0, 0.0, 0.0, 4.9e-4), True),  # two: nothing is sure of it
        ((0.0, 1e-4, 1e-4, 1e-4), False),
        ((0.0, 1.0, 0.0, 1e-4), True),  # as large a share may have been there at step 29
        ((0.0, 0.01, 0.0, 1e-4), True),
    ],
)
def test_a_mean_counts_as_far_as_its_standard_error_lets_it(errors, passed):
    points = [
        replace(p, mean_loss=p.loss, mean_reference=p.reference, mean_error=error)
        for p, error in zip(comparisons_at(lambda loss: 1e-3), errors, strict=True)
    ]
    assert check_error_floor(points, QUIET, SHORTER, DEFAULT).passed is passed


def test_an_excess_below_zero_within_its_error_is_a_floor_all_the_same():
    excess, errors = (-1e-4, 2e-4, 1e-3), (2e-4, 2e-4, 1e-4)
    points = [
        replace(p, mean_loss=p.reference + e, mean_reference=p.reference, mean_error=error)
        for p, e, error in zip(comparisons_at(lambda loss: 0.0)[1:], excess, errors, strict=True)
    ]
    assert not check_error_floor(points, QUIET, SHORTER, DEFAULT).passed
    certain = [replace(p, mean_error=0.0) for p in points]
    assert check_error_floor(certain, QUIET, SHORTER, DEFAULT).passed


def test_means_are_of_the_same_batches_and_have_the_error_of_their_difference():
    point = StepComparison(119, 1.0, 1.0, 0.01)
    found = point.with_mean_losses((1.0, 2.5, 4.0), (1.0, 2.0, 3.0))
    assert found.losses == (2.5, 2.0)
    assert found.mean_error == pytest.approx(0.5 / 3**0.5)  # differences 0, 0.5 and 1
    assert point.with_mean_losses((), ()) == point
    assert point.with_mean_losses((1.0, float("nan")), (1.0, 1.0)) == point
    assert point.with_mean_losses((1.0,), (1.0,)).mean_error == float("inf")


def test_no_floor_is_foretold_where_the_loss_has_settled_or_noise_does_as_much():
    points = comparisons_at(lambda loss: 1e-3)
    settled = Trajectory(tuple(2.0 for _ in range(120)))
    assert not check_error_floor(points, QUIET, SeedRun(settled, settled), DEFAULT).judged
    agrees = replace(SHORTER, candidate=SHORTER.reference)
    assert check_error_floor(points, QUIET, agrees, DEFAULT).passed
    noise = tuple(NoisyStep(p.step, p.reference + 1e-3, p.reference) for p in points)
    assert check_error_floor(points, noise, SHORTER, DEFAULT).passed
    assert check_error_floor(points, noise[-1:], SHORTER, DEFAULT).passed
    near_zero = NoisyStep(119, 0.025, 0.0)  # its loss itself is what noise does
    assert check_error_floor(points, (near_zero,), SHORTER, DEFAULT).passed
    for elsewhere in ((), noise[:-1]):  # the noise of other steps excuses nothing
        assert not check_error_floor(points, elsewhere, SHORTER, DEFAULT).passed
    too_few = check_error_floor(points[:2], QUIET, SHORTER, DEFAULT)
    assert too_few == Check(judged=False)


def test_a_floor_is_drift():
    early, late = (
        comparisons_at(lambda loss: 2e-4, (0, 2, 8, 29)),
        comparisons_at(lambda loss: 4e-4, (59, 119)),
    )
    passed = evidence(times(1.0), comparisons=early, noise=QUIET)
    assert judge(passed, DEFAULT).accepted
    verdict = judge(replace(passed, late_comparisons=late, long_runs=(SHORTER,)), DEFAULT)
    assert verdict.verdict == "drift"
    assert "an error that stays" in verdict.reason


def test_a_floor_is_told_with_its_steps_shares_and_where_it_leads():
    found = check_error_floor(comparisons_at(lambda loss: 1e-3), QUIET, SHORTER, DEFAULT)
    assert (found.step, found.judged, found.of_loss) == (119, True, True)
    assert found.deviation == pytest.approx(0.3434, abs=5e-5)  # 0.06 / 0.418**2
    assert found.problem == (
        "at the same weights of steps 29, 59, 119 its loss is 1.5 %, 3 %, 6 % above float32's: an "
        "error that stays constant while the loss falls; it will be 34 % of the loss by step 480, "
        "if that keeps falling"
    )


EVEN, STEEP = (1 / 16, 1 / 32, 1 / 64), (1 / 16, 1 / 64, 1 / 256)


def floor_of(
    *amounts: float,
    errors: tuple[float, ...] = (0.0, 0.0, 0.0),
    levels: tuple[float, ...] = EVEN,
    trained: float = 1e-3,
) -> Check:
    """Check three marks by their excesses, standard errors and float32 losses."""
    points = [
        StepComparison(
            step, None, 1.0, 0.01, mean_loss=level + amount, mean_reference=level, mean_error=error
        )
        for step, amount, level, error in zip((29, 59, 119), amounts, levels, errors, strict=True)
    ]
    plain = CURVE[:120]
    candidate = Trajectory(tuple(loss + trained for loss in plain))
    return check_error_floor(points, (), SeedRun(Trajectory(plain), candidate), DEFAULT)


@pytest.mark.parametrize(
    ("amounts", "given", "passed"),
    [
        ((1e-3, 6e-4, 1e-3), {}, False),
        ((1e-3, 4e-4, 1e-3), {}, True),  # less than half was left in between
        ((1e-3, 4e-4, 1e-3), {"errors": (1.5e-4, 0.0, 0.0)}, False),  # of 7e-4 perhaps
        ((0.0, 1e-3, 1e-3), {}, True),
        ((1e-3, 1e-3, 1e-3), {"trained": 4.9e-4}, True),  # less than half is left by training
        ((1e-3, 1e-3, 1e-3), {"trained": 5.1e-4}, False),
        ((1e-3, 1e-3, 1e-3), {"trained": 4.5e-4, "errors": (0.0, 0.0, 1e-4)}, False),
        ((1e-3, 1.9e-3, 1e-3), {"trained": 6e-4, "levels": STEEP}, False),
        (
            (1e-3, 1e-3, 1e-3),
            {"trained": 3e-4, "errors": (0.0, 4e-4, 0.0), "levels": STEEP},
            True,
        ),
    ],
)
def test_a_floor_stays_and_is_there_after_training(amounts, given, passed):
    assert floor_of(*amounts, **given).passed is passed


@pytest.mark.parametrize(
    ("percents", "passed"),
    [
        ((2.0, 3.2, 5.0), False),
        ((2.0, 3.2, 4.9), False),
        ((2.0, 2.2, 4.4), True),  # grown by less than 1.5 twice
        ((1.0, 3.2, 4.7), True),  # by less than 1.5 at last
    ],
)
def test_a_floor_grows_as_a_share_of_the_loss(percents, passed):
    amounts = (share / 100 * level for share, level in zip(percents, EVEN, strict=True))
    assert floor_of(*amounts).passed is passed


@pytest.mark.parametrize(
    ("losses", "amounts", "deviation"),
    [
        # 1e-4 of the first loss is the least that divides, now and later
        (tuple(2.0 * 0.9**step for step in range(120)), (1e-5, 1e-5, 1e-5), 0.05),
        # or of the largest, where the first is 0
        ((0.0, *(2.0 * 0.9**step for step in range(1, 120))), (1e-5, 1e-5, 1e-5), 1e-5 / 1.8e-4),
    ],
)
def test_a_floor_under_a_loss_near_zero_is_a_share_of_the_first(losses, amounts, deviation):
    points = [
        StepComparison(step, losses[step] + amount, losses[step], 0.01)
        for step, amount in zip((29, 59, 119), amounts, strict=True)
    ]
    run = SeedRun(Trajectory(losses), Trajectory(tuple(x + amounts[-1] for x in losses)))
    found = check_error_floor(points, (), run, DEFAULT)
    assert found == Check(deviation=pytest.approx(deviation))


@pytest.mark.parametrize(("excess", "verdict"), [(5e-4, "drift"), (1e-5, "equal")])
def test_a_loss_that_float32_brings_to_zero_is_judged_too(excess, verdict):
    """As a hinge loss is, once every sample is on its side."""
    plain = tuple(max(0.0, 2.0 - step / 8) for step in range(30))
    run = SeedRun(Trajectory(plain), Trajectory(tuple(loss + excess for loss in plain)))
    points = tuple(
        StepComparison(step, plain[step] + excess, plain[step], 0.01) for step in (0, 2, 8, 29)
    )
    found = judge(ProofEvidence(points, runs=(run, run)), DEFAULT)
    assert found.verdict == verdict
    assert found.accepted or "it will be 250 % of the loss" in found.reason
