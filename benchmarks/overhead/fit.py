"""What the overhead's numbers mean: intervals over processes, the fixed cost, what is promised.

Where a process lies in memory moves its steps by more than a step's overhead, and no number of
rounds in one process shows that. So a process gives one value, and intervals are over processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from autoprec.core.dtypes import Policy
from autoprec.core.number_words import times
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.statistics import median_interval
from benchmarks.search.oracle_rows import ratio_text

#: What a step of at least so many seconds may cost through a profile, and by which ways.
PROMISED_RATIO, PROMISED_FROM = 1.01, 0.0045
TORCH, FIT = "torch loop", "Keras fit"
WATCHED = "torch loop, checks on over off"
PROMISED_WAYS = (TORCH, FIT)

#: The most microseconds that a step of PyTorch's may cost whatever its length, by policy.
PROMISED_MICROSECONDS: Mapping[str, float] = {
    Policy.FLOAT32.value: 10.0,
    Policy.MIXED_BFLOAT16.value: 30.0,
    Policy.MIXED_FLOAT16.value: 30.0,
}


@dataclass(frozen=True)
class Pair:
    """One process's median seconds at one length of steps: through the profile, and by hand."""

    target: float
    ours: float
    theirs: float
    batch_size: int


@dataclass(frozen=True)
class Interval:
    """A median over processes with its 95 % interval; with fewer than six their whole range."""

    middle: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """The median and its interval."""
    return Interval(median(values), *median_interval(values))


def fixed_cost(pairs: Sequence[Pair]) -> float:
    """The seconds that any step costs more: where a line through the costs meets a step of none.

    Long steps scatter by more, in proportion to their length, and count for less by that much.
    `ValueError` with fewer than two lengths: they make no line.
    """
    if len({pair.theirs for pair in pairs}) < 2:
        raise ValueError(
            f"{len(pairs)} lengths of steps given, expected two different ones or more"
        )
    weights = [pair.theirs**-2 for pair in pairs]
    steps = [pair.theirs for pair in pairs]
    costs = [pair.ours - pair.theirs for pair in pairs]
    total = sum(weights)
    step = sum(w * x for w, x in zip(weights, steps, strict=True)) / total
    cost = sum(w * y for w, y in zip(weights, costs, strict=True)) / total
    rows = list(zip(weights, steps, costs, strict=True))
    slope = sum(w * (x - step) * (y - cost) for w, x, y in rows)
    slope /= sum(w * (x - step) ** 2 for w, x, _ in rows)
    return cost - slope * step


def within(high: float, promised: float | None) -> bool | None:
    """Whether the upper end of an interval keeps what is promised; None where nothing is."""
    return None if promised is None else high <= promised


def case(way: str, policy: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """One length of steps: a pair from each process."""
    ratio = paired_ratio([pair.ours for pair in pairs], [pair.theirs for pair in pairs])
    step = median(pair.theirs for pair in pairs)
    promised = PROMISED_RATIO if way in PROMISED_WAYS and step >= PROMISED_FROM else None
    return {
        "way": way,
        "policy": policy,
        "batch_size": int(median(pair.batch_size for pair in pairs)),
        "step_milliseconds": 1e3 * step,
        "ratio": vars(ratio),
        "cost": vars(interval([pair.ours - pair.theirs for pair in pairs])),
        "promised_ratio": promised,
        "kept": within(ratio.high, promised),
    }


def fixed(way: str, policy: str, processes: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    """The fixed cost: a fit for each process, and their interval."""
    found = interval([fixed_cost(pairs) for pairs in processes])
    promised = PROMISED_MICROSECONDS.get(policy) if way == TORCH else None
    return {
        "way": way,
        "policy": policy,
        "fixed": vars(found),
        "promised_microseconds": promised,
        "kept": within(1e6 * found.high, promised),
    }


def by_target(processes: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """The pairs of each length of steps; only lengths that every process measured."""
    targets = [pair.target for pair in processes[0]]
    found = [[p for pairs in processes for p in pairs if p.target == target] for target in targets]
    return [pairs for pairs in found if len(pairs) == len(processes)]


KEPT, BROKEN, UNRESOLVED, NOTHING = "yes", "no", "unresolved", "nothing promised"


def judged(row: Mapping[str, Any]) -> str:
    """Whether a case or a fixed cost keeps what is promised: the upper end of its interval does.

    Of those that do not, an interval wholly above is broken. One that holds the promised number is
    unresolved: the machine was too noisy. Neither passes the gate (`not_kept`).
    """
    if row["kept"] is not False:
        return NOTHING if row["kept"] is None else KEPT
    if "fixed" in row:
        above = 1e6 * float(row["fixed"]["low"]) > float(row["promised_microseconds"])
    else:
        above = float(row["ratio"]["low"]) > float(row["promised_ratio"])
    return BROKEN if above else UNRESOLVED


def not_kept(result: Mapping[str, Any]) -> list[str]:
    """All whose upper end is above what is promised, unresolved ones included, in words."""
    return in_words(result, UNRESOLVED) + in_words(result, BROKEN)


def in_words(result: Mapping[str, Any], judgement: str) -> list[str]:
    """What was judged so, with its interval, in words."""
    lines = [
        f"{r['way']}, {r['policy']}, step {r['step_milliseconds']:.1f} ms: "
        f"{ratio_text(r['ratio'], 4)}, promised {times(r['promised_ratio'])}"
        for r in result["cases"]
        if judged(r) == judgement
    ]
    lines += [
        f"{r['way']}, {r['policy']}: fixed cost {1e6 * r['fixed']['low']:.0f} to "
        f"{1e6 * r['fixed']['high']:.0f} us, promised {r['promised_microseconds']:.0f} us"
        for r in result["fixed"]
        if judged(r) == judgement
    ]
    return lines
