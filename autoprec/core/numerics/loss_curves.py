"""Tests whole training runs: stability, the trajectory, and the user's own metric.

The trajectory is calibrated by a null, too: how far small noise in the initial weights drives
float32 itself, so that chaotic training is not blamed on the precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoprec.core.number_words import percent, plain_number
from autoprec.core.numerics.tolerance import (
    SMALLEST_LOSS_SHARE,
    Check,
    Tolerance,
    chance,
    finite_or_none,
    mean,
    relative_deviation,
    root_mean_square,
    size_of,
)
from autoprec.core.numerics.traces import Trajectory

MIN_STEPS = 5
"""A trajectory shorter than this is not judged: its last fifth would be less than one step."""


LATE_NOISE_FACTOR = 3.0
"""A run may end this many times as far from float32 as noise drives the steps of its second
half."""

SEED_SPREAD_SHARE = 0.5
"""If float32's own seeds end this far apart, relative to their mean, a loss curve cannot show a
smaller difference."""


@dataclass(frozen=True)
class SeedRun:
    """One seed's runs: float32, the candidate, and float32 with noisy weights (None: not run)."""

    reference: Trajectory
    candidate: Trajectory
    noisy: Trajectory | None = None

    def above(self, origin: float) -> SeedRun:
        """Return the runs with their losses counted from `origin`."""
        noisy = None if self.noisy is None else self.noisy.above(origin)
        return SeedRun(self.reference.above(origin), self.candidate.above(origin), noisy)


def check_stability(runs: Iterable[Trajectory], tolerance: Tolerance) -> Check:
    """Check that every loss is finite and that no run skips more steps than allowed."""
    skipped = 0
    for run in runs:
        skipped += len(run.skipped)
        for step, loss in enumerate(run.losses):
            if loss is None or not math.isfinite(loss):
                return Check(problem=f"the loss is not finite at step {step}", step=step)
        if len(run.skipped) > tolerance.skipped:
            return Check(
                problem=(
                    f"{len(run.skipped)} of {len(run.losses)} steps were skipped because "
                    "gradients overflowed"
                ),
                step=run.skipped[0],
                skipped=skipped,
            )
    return Check(skipped=skipped)


def check_trajectory(runs: Sequence[SeedRun], tolerance: Tolerance) -> Check:
    """Check that training from the same start stays with float32.

    It fails if the mean loss of the last fifth deviates by more than `tolerance.trajectory` and
    the root mean square deviation of the whole run is more than `tolerance.trajectory_null` times
    that of noisy float32 (plus `tolerance.trajectory_slack` of the first loss); or if the last
    fifth is more than `LATE_NOISE_FACTOR` times as far away as noise drives the steps of the second
    half: noise that training averages out does not excuse a deviation that stays. If float32's
    own seeds end `SEED_SPREAD_SHARE` apart or more, it must be further away than they are.
    """
    judged = [pair for pair in (_aligned(run) for run in runs) if pair is not None]
    if not judged:
        return Check(judged=False)
    difference = mean(_tail_deviation(pair) for pair in judged)
    distance = root_mean_square(_relative_distance(p.candidate, p.reference) for p in judged)
    nulls = [_relative_distance(p.noisy, p.reference) for p in judged if p.noisy]
    null = root_mean_square(nulls)
    ratio = distance / (null + tolerance.trajectory_slack)
    second_half = root_mean_square(_second_half_deviation(pair) for pair in judged)
    numbers = Check(
        deviation=finite_or_none(difference),
        ratio=finite_or_none(ratio),
        noise=finite_or_none(null),
        second_half=finite_or_none(second_half),
    )
    allowed = max(tolerance.trajectory, seed_spread([pair.reference for pair in judged]))
    late_noise = _second_half_noise(judged)
    stays = math.isfinite(null) and difference > chance(late_noise, LATE_NOISE_FACTOR)
    if difference <= tolerance.trajectory:
        return replace(numbers, below=_both_below(judged))
    if difference <= allowed:
        return replace(numbers, excused="float32's own seeds end as far from each other")
    if ratio <= tolerance.trajectory_null and not stays:
        return replace(numbers, excused="noise in the weights moves float32 as much")
    steps = min(len(pair.reference) for pair in judged)
    problem = (
        f"after {steps} steps its loss is {percent(difference)} away from float32's, "
        f"{plain_number(ratio)} times as far as small noise drives float32"
    )
    if ratio <= tolerance.trajectory_null:
        problem += f", which by then is {percent(late_noise)} away at single steps"
    step = _first_divergent_step(judged, null, tolerance)
    return replace(numbers, problem=problem, of_loss=True, step=step)


def seed_spread(references: Sequence[Sequence[float]]) -> float:
    """Return the relative spread of float32's final losses over seeds; 0 below the threshold."""
    ends = [mean(losses[-max(1, len(losses) // 5) :]) for losses in references]
    middle = abs(mean(ends))
    apart = (max(ends) - min(ends)) / middle if middle else 0.0
    return apart if apart >= SEED_SPREAD_SHARE else 0.0


def check_metric(runs: Sequence[SeedRun], tolerance: Tolerance) -> Check:
    """Check the user's own metric (higher is better) after an equal number of steps, over seeds."""
    pairs = [
        (run.reference.metric, run.candidate.metric, run.noisy.metric if run.noisy else None)
        for run in runs
        if len(run.reference.losses) == len(run.candidate.losses)
    ]
    known = [(r, c, n) for r, c, n in pairs if r is not None and c is not None]
    if not known:
        return Check(judged=False)
    reference = mean(r for r, _, _ in known)
    candidate = mean(c for _, c, _ in known)
    null = max((abs(n - r) for r, _, n in known if n is not None), default=0.0)
    numbers = Check(
        value=finite_or_none(candidate),
        reference=finite_or_none(reference),
        noise=finite_or_none(null),
    )
    drop = reference - candidate
    if drop <= max(tolerance.metric * abs(reference), tolerance.metric_null * null):
        return numbers
    reached, expected = plain_number(candidate, 4), plain_number(reference, 4)
    problem = f"evaluate(model) gives {reached} where float32 reaches {expected}"
    return replace(numbers, problem=problem, step=len(runs[0].candidate.losses))


@dataclass(frozen=True)
class _AlignedLosses:
    """One seed's losses, cut to the steps of all runs that stay finite; what ended is infinite."""

    reference: tuple[float, ...]
    candidate: tuple[float, ...]
    noisy: tuple[float, ...]


def _aligned(run: SeedRun) -> _AlignedLosses | None:
    rows = [run.reference, run.candidate] + ([run.noisy] if run.noisy else [])
    steps = min((len(row.losses) for row in rows if row.finite), default=0)
    if steps < MIN_STEPS:
        return None
    losses = [
        tuple(math.inf if x is None else x for x in row.losses[:steps])
        + (math.inf,) * (steps - len(row.losses))
        for row in rows
    ]
    return _AlignedLosses(losses[0], losses[1], losses[2] if run.noisy else ())


def _tail_deviation(pair: _AlignedLosses) -> float:
    tail = max(1, len(pair.reference) // 5)
    reference, candidate = mean(pair.reference[-tail:]), mean(pair.candidate[-tail:])
    return relative_deviation(candidate, reference, SMALLEST_LOSS_SHARE * size_of(pair.reference))


def _both_below(pairs: Sequence[_AlignedLosses]) -> float | None:
    """Return `SMALLEST_LOSS_SHARE` if all runs end below that share of the first loss."""
    ends = [
        mean(losses[-max(1, len(losses) // 5) :]) / (size_of(pair.reference) or 1.0)
        for pair in pairs
        for losses in (pair.reference, pair.candidate)
    ]
    return SMALLEST_LOSS_SHARE if max(ends) < SMALLEST_LOSS_SHARE else None


def _second_half_deviation(pair: _AlignedLosses) -> float:
    """Return the root mean square of single steps' deviations over the second half."""
    half = len(pair.reference) // 2
    floor = SMALLEST_LOSS_SHARE * size_of(pair.reference)
    steps = zip(pair.candidate[half:], pair.reference[half:], strict=True)
    return root_mean_square(relative_deviation(ours, theirs, floor) for ours, theirs in steps)


def _second_half_noise(pairs: Sequence[_AlignedLosses]) -> float:
    """Return how far noise drives single steps of the second half; infinity if not run."""
    noisy = [replace(pair, candidate=pair.noisy) for pair in pairs if pair.noisy]
    return root_mean_square(_second_half_deviation(pair) for pair in noisy) if noisy else math.inf


def _relative_distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    size = size_of(reference) or 1.0
    return root_mean_square((a - b) / size for a, b in zip(losses, reference, strict=True))


def _first_divergent_step(
    pairs: Sequence[_AlignedLosses], null: float, tolerance: Tolerance
) -> int:
    """Return the first step at which a run is further away than allowed."""
    sizes = [size_of(pair.reference) or 1.0 for pair in pairs]
    for step in range(min(len(pair.reference) for pair in pairs)):
        for pair, size in zip(pairs, sizes, strict=True):
            distance = abs(pair.candidate[step] - pair.reference[step]) / size
            if distance > tolerance.trajectory_null * (null + tolerance.trajectory_slack):
                return step
    return 0


# Curves to look at: few enough points for a file and a picture ---------------------------------

#: Points of a sampled curve, as far as a run has so many steps.
POINTS = 40

Losses = tuple[float | None, ...]


@dataclass(frozen=True)
class LossCurves:
    """Loss curves of one seed, each point the mean loss of a stretch of steps (None: not finite).

    `steps` are the last steps of the stretches, counted from 0. `noise` is float32 with a little
    noise on its initial weights, and as short as that run was; empty if none was needed.
    """

    steps: tuple[int, ...]
    float32: Losses
    candidate: Losses
    noise: Losses = ()


def sample_curves(runs: Sequence[SeedRun]) -> LossCurves | None:
    """Return the curves of the longest run; None if nothing was trained."""
    longest = max(runs, key=lambda run: len(run.candidate.losses), default=None)
    if longest is None or not longest.candidate.losses:
        return None
    count = min(len(longest.reference.losses), len(longest.candidate.losses))
    ends = [round((index + 1) * count / min(POINTS, count)) for index in range(min(POINTS, count))]
    noisy = next((run.noisy for run in runs if run.noisy is not None), None)
    return LossCurves(
        steps=tuple(end - 1 for end in ends),
        float32=_means(longest.reference, ends),
        candidate=_means(longest.candidate, ends),
        noise=() if noisy is None else _means(noisy, ends),
    )


def _means(run: Trajectory, ends: Sequence[int]) -> Losses:
    """Return the mean loss up to each of the `ends`, as far as the run goes."""
    means: list[float | None] = []
    begin = 0
    for end in ends:
        if end > len(run.losses):
            break
        losses = run.losses[begin:end]
        begin = end
        if any(loss is None or not math.isfinite(loss) for loss in losses):
            means.append(None)
        else:
            mean = math.fsum(loss for loss in losses if loss is not None) / len(losses)
            means.append(float(f"{mean:.5g}"))
    return tuple(means)
