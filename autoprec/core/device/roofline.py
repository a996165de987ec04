"""Finds what limits a training step: arithmetic, memory, overhead or the data pipeline.

A step of t seconds that does f floating-point operations on a device whose matrix products reach p
operations per second spends at least f / p of it on arithmetic. The rest is memory traffic, which
grows with the batch, or overhead, which does not. Of the traffic only the least is known: the
update writes and reads every gradient and every weight, and what the backward pass needs of the
forward pass is written and read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ARITHMETIC_BOUND_SHARE = 0.4


@dataclass(frozen=True)
class Bound:
    """The limit's name, and the shares of the measured peaks the step reaches (None: not known).

    `memory_share` is the least traffic's share of the bandwidth; caches can make it more than 1.
    """

    name: str
    peak_share: float | None
    sentence: str
    memory_share: float | None = None


def min_traffic_bytes(trainable_bytes: float, saved_bytes: float) -> float:
    """Return the least bytes that a training step moves, whatever its optimizer's state."""
    return 4 * trainable_bytes + 2 * saved_bytes


def find_bound(
    *,
    step_seconds: float,
    samples: float,
    flops_per_sample: float | None,
    peak_gflops: float | None,
    traffic: float = 0.0,
    bandwidth_gbps: float | None = None,
    data_seconds: float = 0.0,
    curve: Sequence[tuple[float, float]] = (),
) -> Bound:
    """Name what bounds a step.

    `traffic` are the bytes it moves at least (0: not known), see `min_traffic_bytes`. `curve` holds
    (samples, seconds) of the same recipe at other batches: a step whose time hardly grows with the
    batch is overhead. A loader slower than the step bounds real training whatever the step does.
    """
    share = None
    if flops_per_sample and peak_gflops:
        share = flops_per_sample * samples / (peak_gflops * 1e9) / step_seconds
    memory = None
    if traffic and bandwidth_gbps:
        memory = traffic / (bandwidth_gbps * 1e9) / step_seconds
    name, sentence = _limit(step_seconds, samples, share, data_seconds, curve)
    return Bound(name, share, sentence, memory)


def _limit(
    step_seconds: float,
    samples: float,
    share: float | None,
    data_seconds: float,
    curve: Sequence[tuple[float, float]],
) -> tuple[str, str]:
    """Return the limit's name, and a sentence with its numbers."""
    arithmetic = None if share is None else share * step_seconds
    shown = _milliseconds(step_seconds)
    if data_seconds > step_seconds:
        return (
            "data pipeline",
            f"the loader needs {_milliseconds(data_seconds)} for a step of {shown}: training waits "
            "for data",
        )
    if share is not None and arithmetic is not None and share >= ARITHMETIC_BOUND_SHARE:
        return "arithmetic", f"{_milliseconds(arithmetic)} of arithmetic in a step of {shown}"
    overhead = _overhead_share(samples, step_seconds, curve)
    if overhead is not None and overhead > 0.5:
        what = "" if arithmetic is None else f"{_milliseconds(arithmetic)} of arithmetic in "
        return "overhead", f"the step is overhead-bound: {what}{shown}"
    what = "" if arithmetic is None else f", {_milliseconds(arithmetic)} of it arithmetic at peak"
    return "memory", f"the step takes {shown}{what}"


def _overhead_share(
    samples: float, seconds: float, curve: Sequence[tuple[float, float]]
) -> float | None:
    """Return the share of the step that does not grow with the batch, by a linear fit."""
    points = sorted({(float(b), t) for b, t in curve} | {(float(samples), seconds)})
    if len({b for b, _ in points}) < 2:
        return None
    # Relative least squares: small steps count as much as large ones.
    weights = [1 / (t * t) for _, t in points]
    total = sum(weights)
    mean_b = sum(w * b for w, (b, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (b - mean_b) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (b - mean_b) * (t - mean_t) for w, (b, t) in zip(weights, points, strict=True))
        / spread
    )
    return min(1.0, max(0.0, 1 - max(slope, 0.0) * samples / seconds))


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.2g} ms"
