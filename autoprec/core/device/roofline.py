"""Finds what limits a training step: arithmetic, memory, overhead, the loader, or nothing known.

A step of t seconds that does f floating-point operations on a device whose matrix products reach p
operations per second spends at least f / p of it on arithmetic. The rest is memory traffic and slow
operators, which grow with the batch, or overhead, which does not. Of the traffic only the least is
known: the update writes and reads every gradient and every weight, and what the backward pass needs
of the forward pass is written and read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.core.number_words import milliseconds

#: A limit is named if it explains half of the step: below that, most of the time goes elsewhere.
EXPLAINING_SHARE = 0.5

#: A step that reaches this many times the measured peak disproves it: the products were disturbed
#: when they were timed alone. Nothing is said of arithmetic then.
DISPROVING_SHARE = 2.0

ARITHMETIC, MEMORY, UNKNOWN = "arithmetic", "memory", "unknown"
UPDATE = "the optimizer's update"


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


@dataclass(frozen=True)
class _Shares:
    """The shares of a step that each possible limit explains (None: not known)."""

    arithmetic: float | None
    memory: float | None
    launching: float
    update: float
    overhead: float | None
    operator: str
    operator_share: float


def find_bound(
    *,
    step_seconds: float,
    samples: float,
    flops_per_sample: float | None,
    peak_gflops: float | None,
    traffic: float = 0.0,
    bandwidth_gbps: float | None = None,
    data_seconds: float = 0.0,
    launch_seconds: float = 0.0,
    update_seconds: float = 0.0,
    operator: tuple[str, float] = ("", 0.0),
    curve: Sequence[tuple[float, float]] = (),
) -> Bound:
    """Name what bounds a step: what explains at least half of its time, or that nothing does.

    `traffic` are the bytes it moves at least (0: not known), see `min_traffic_bytes`;
    `launch_seconds` what launching its kernels one by one takes (0: it is no such device);
    `update_seconds` what the optimizer's update takes in such a step (0: not measured);
    `operator` the slowest operator and its share of such a step, if that was measured. `curve`
    holds (samples, seconds) of the same recipe at other batches: a step whose time hardly grows
    with the batch is overhead. Of a peak that the step disproves, nothing is told. A loader slower
    than the step bounds real training whatever the step does.
    """
    share = None
    if flops_per_sample and peak_gflops:
        share = flops_per_sample * samples / (peak_gflops * 1e9) / step_seconds
        share = None if share > DISPROVING_SHARE else share
    memory = None
    if traffic and bandwidth_gbps:
        memory = traffic / (bandwidth_gbps * 1e9) / step_seconds
    launching = min(1.0, launch_seconds / step_seconds)
    overhead = _overhead_share(samples, step_seconds, curve)
    update = min(1.0, update_seconds / step_seconds)
    shares = _Shares(share, memory, launching, update, overhead, *operator)
    name, sentence = _limit(step_seconds, shares, data_seconds)
    return Bound(name, share, sentence, memory)


def _limit(step_seconds: float, shares: _Shares, data_seconds: float) -> tuple[str, str]:
    """Return the limit's name, and a sentence with its numbers."""

    def told(share: float | None) -> str:  # a peak was measured, too: a share may be more than 1
        return milliseconds(min(1.0, share or 0.0) * step_seconds)

    shown, loading = milliseconds(step_seconds), milliseconds(data_seconds)
    if data_seconds > step_seconds:
        why = f"the loader needs {loading} for a step of {shown}: training waits for data"
        return "data pipeline", why
    arithmetic, memory = shares.arithmetic or 0.0, shares.memory or 0.0
    if max(arithmetic, memory) >= EXPLAINING_SHARE:
        if arithmetic >= min(1.0, memory):
            return ARITHMETIC, f"{told(arithmetic)} of arithmetic in a step of {shown}"
        return MEMORY, f"{told(memory)} of memory traffic in a step of {shown}"
    if shares.launching >= EXPLAINING_SHARE:
        some = f"some {told(shares.launching)} of a step of {shown}"
        return "launches", f"launching its kernels one by one takes {some}"
    if shares.update >= EXPLAINING_SHARE:
        return UPDATE, f"the optimizer's update takes {told(shares.update)} of a step of {shown}"
    if shares.overhead is not None and shares.overhead > EXPLAINING_SHARE:
        known = "" if shares.arithmetic is None else f"{told(arithmetic)} of arithmetic in "
        return "overhead", f"the step is overhead-bound: {known}{shown}"
    why, operator = unexplained(shares.arithmetic, shares.memory), shares.operator
    if operator and shares.operator_share >= EXPLAINING_SHARE:
        most = f"{shares.operator_share:.0%} of it in one operator, {operator}"
        return f"the operator {operator}", f"the step takes {shown}, {most}; {why}"
    return UNKNOWN, f"the step takes {shown}; {why}"


def limit_text(name: str, peak_share: float | None, memory_share: float | None) -> str:
    """Say what limits a step, or that nothing known explains half of it."""
    known = known_limit(name, peak_share, memory_share)
    return f"{UNKNOWN}: {unexplained(peak_share, memory_share)}" if known is None else known


def known_limit(name: str, peak_share: float | None, memory_share: float | None) -> str | None:
    """Return the name of a limit that explains half of a step; None if none is known.

    Profiles of before that rule say "memory" of every step that nothing explains.
    """
    own = {ARITHMETIC: peak_share, MEMORY: memory_share}
    explains = name not in own or (own[name] or 0.0) >= EXPLAINING_SHARE
    return name if name != UNKNOWN and explains else None


def unexplained(peak_share: float | None, memory_share: float | None) -> str:
    """Return why neither arithmetic nor memory traffic is what limits a step."""
    arithmetic = None if peak_share is None else f"arithmetic ({peak_share:.0%} of the peak)"
    memory = (
        None if memory_share is None else f"memory traffic ({memory_share:.0%} of the bandwidth)"
    )
    if arithmetic and memory:
        return f"neither {arithmetic} nor {memory} explains its time"
    if arithmetic or memory:
        return f"{arithmetic or memory} does not explain its time"
    return "what limits it was not measured"


def _overhead_share(
    samples: float, seconds: float, curve: Sequence[tuple[float, float]]
) -> float | None:
    """Return the share of the step that does not grow with the batch, by a linear fit."""
    points = sorted({(float(b), t) for b, t in curve} | {(float(samples), seconds)})
    if len({b for b, _ in points}) < 2:
        return None
    # Relative least squares: small steps count as much as large ones.
    weighed = [(1 / (t * t), b, t) for b, t in points]
    total = sum(w for w, _, _ in weighed)
    mean_b = sum(w * b for w, b, _ in weighed) / total
    mean_t = sum(w * t for w, _, t in weighed) / total
    spread = sum(w * (b - mean_b) ** 2 for w, b, _ in weighed)
    slope = sum(w * (b - mean_b) * (t - mean_t) for w, b, t in weighed) / spread
    return min(1.0, max(0.0, 1 - max(slope, 0.0) * samples / seconds))
