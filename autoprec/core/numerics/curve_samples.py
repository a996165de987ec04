"""Samples the loss curves of a proof for looking at: few enough points for a file and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.traces import Trajectory

#: Points of a sampled curve, as far as a run has so many steps.
POINTS = 40

Losses = tuple[float | None, ...]


@dataclass(frozen=True)
class LossCurves:
    """Loss curves of one seed, each point the mean loss of a stretch of steps (None: not finite).

    `steps` are the last steps of the stretches, counted from 0. `noise` is float32 with a little
    noise on its initial weights, and as short as that run was; empty where none was needed.
    """

    steps: tuple[int, ...]
    float32: Losses
    candidate: Losses
    noise: Losses = ()


def sample_curves(runs: Sequence[SeedRun]) -> LossCurves | None:
    """Return the curves of the longest run; None where nothing was trained."""
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
    found: list[float | None] = []
    begin = 0
    for end in ends:
        if end > len(run.losses):
            break
        losses = run.losses[begin:end]
        begin = end
        if any(loss is None or not math.isfinite(loss) for loss in losses):
            found.append(None)
        else:
            mean = math.fsum(loss for loss in losses if loss is not None) / len(losses)
            found.append(float(f"{mean:.5g}"))
    return tuple(found)
