"""The table of limits in docs/method.md: the numbers that decide, read from the code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

#: From the constants' values to the numbers shown.
Made = Callable[..., tuple[float, ...]]

_SPEED = "core.speed.assumptions:Assumptions"
_TOLERANCE = "core.numerics.tolerance:Tolerance"
_LATE = "core.numerics.late_failures"
_MIB = 2.0**20


def as_it_is(*values: float) -> tuple[float, ...]:
    """Return the values themselves."""
    return values


def per_cent(*values: float) -> tuple[float, ...]:
    """Return shares in per cent."""
    return tuple(100 * value for value in values)


def share_and_factor(share: float, factor: float) -> tuple[float, ...]:
    """Return a share in per cent, and a factor."""
    return 100 * share, factor


def product(*values: float) -> tuple[float, ...]:
    """Return the product of shares and factors, in per cent."""
    return (100 * math.prod(values),)


def above_one(*values: float) -> tuple[float, ...]:
    """Return by how many per cent ratios exceed one."""
    return tuple(100 * (value - 1) for value in values)


def micro(*values: float) -> tuple[float, ...]:
    """Return seconds in microseconds."""
    return tuple(1e6 * value for value in values)


def mebi(*values: float) -> tuple[float, ...]:
    """Return bytes in MiB."""
    return tuple(value / _MIB for value in values)


@dataclass(frozen=True)
class Limit:
    """A row: what is limited, the number in words, and the constants it is made of.

    A path is a module and a name in it, "core.module:NAME" or "core.module:Class.field"; one of a
    tuple gives all its members. `shown` has a place for every number.
    """

    what: str
    shown: str
    paths: tuple[str, ...]
    made: Made = as_it_is

    def text(self) -> str:
        """Return the numbers as they are shown."""
        values = [value for path in self.paths for value in constant(path)]
        return self.shown.format(*self.made(*values))

    def where(self) -> str:
        """Return the constants' places, each module named once."""
        names: dict[str, list[str]] = {}
        for path in self.paths:
            module, _, name = path.partition(":")
            names.setdefault(module, []).append(name)
        return "; ".join(f"`{module}`: {', '.join(own)}" for module, own in names.items())


def constant(path: str) -> tuple[float, ...]:
    """Return a constant's value, or its members; `AttributeError` where there is none."""
    module, _, names = path.partition(":")
    value: Any = import_module(f"autoprec.{module}")
    for name in names.split("."):
        value = getattr(value, name)
    return tuple(map(float, value)) if isinstance(value, tuple) else (float(value),)


def _tolerance(name: str) -> tuple[str, str]:
    return f"{_TOLERANCE}.{name}", f"{_TOLERANCE}.{name}_null"


_OR_NOISE = "{:g} %, or {:g} times what noise does"
_LONG = (f"{_TOLERANCE}.trajectory", f"{_LATE}:LONG_RUN_FACTOR")

#: By stage.
LIMITS: dict[str, tuple[Limit, ...]] = {
    "Check": (
        Limit("loss at the same weights", _OR_NOISE, _tolerance("loss"), share_and_factor),
        Limit("gradient at the same weights", _OR_NOISE, _tolerance("gradient"), share_and_factor),
        Limit("a buffer's change", _OR_NOISE, _tolerance("buffer"), share_and_factor),
        Limit(
            "outputs in evaluation, of how they vary over the batch",
            _OR_NOISE,
            ("core.numerics.single_step:NOTHING_LEFT", f"{_TOLERANCE}.loss_null"),
            share_and_factor,
        ),
        Limit("loss curve", _OR_NOISE, _tolerance("trajectory"), share_and_factor),
        Limit("`evaluate(model)`", _OR_NOISE, _tolerance("metric"), share_and_factor),
        Limit("steps skipped in one run", "{:g}", (f"{_TOLERANCE}.skipped",)),
        Limit("a long run's end", "{:g} %", _LONG, product),
        Limit(
            "a long run's end from which a second seed runs",
            "{:g} %",
            (*_LONG, f"{_LATE}:SECOND_SEED_SHARE"),
            product,
        ),
        Limit("times as far as noise drives float32", "{:g}", (f"{_LATE}:NOISE_FACTOR",)),
        Limit(
            "a difference that only noise excuses and training must confirm",
            "{:g} %",
            (f"{_TOLERANCE}.loss", "core.numerics.single_step:UNTRAINED_NOISE_FACTOR"),
            product,
        ),
        Limit(
            "single steps in a settling run's second half (root mean square)",
            "{:g} %",
            (f"{_TOLERANCE}.trajectory", "core.numerics.judging:SECOND_HALF_FACTOR"),
            product,
        ),
        Limit(
            "a training so close that one seed is enough",
            "{:g} %",
            ("core.numerics.judging:CLOSE_DEVIATION",),
            per_cent,
        ),
        Limit(
            "a fall of the loss, as the steps double, that keeps a run going",
            "{:g} %",
            ("core.numerics.proof_steps:FALLING_LOSS_SHARE",),
            per_cent,
        ),
        Limit(
            "lengths of a check in steps",
            "{:g}, {:g}, {:g}, {:g}",
            ("core.numerics.proof_steps:PROOF_LENGTHS",),
        ),
        Limit(
            "time that the length is chosen for (`--proof-seconds`)",
            "{:g} s",
            ("core.numerics.proof_steps:DEFAULT_SECONDS",),
        ),
        Limit(
            "duration of a float32 step that a check's trainings aim at",
            "{:g} s",
            ("core.numerics.proof_steps:CHECK_STEP_SECONDS",),
        ),
    ),
    "Timing": (
        Limit("confidence of every interval", "{:g} %", ("core.statistics:CONFIDENCE",), per_cent),
        Limit(
            "width of the interval at which a trial ends",
            "{:g} %",
            ("core.speed.timing_budget:TimingBudget.precision",),
            per_cent,
        ),
        Limit(
            "slower than predicted by this much: timed twice",
            "{:.0f} to {:.0f} %",
            (f"{_SPEED}.disturbed_ratio_range",),
            above_one,
        ),
        Limit(
            "growth of memory that counts as warm-up",
            "{:g} MiB",
            ("backends.shared.process_memory:MemoryGrowth.NOISE_BYTES",),
            mebi,
        ),
        Limit(
            "share of the processors that others may use",
            "{:g} %",
            ("core.speed.contention:BUSY_SHARE",),
            per_cent,
        ),
        Limit(
            "waiting for others: at a time, in all, share of a time limit",
            "{:g} s, {:g} s, {:g} %",
            (
                "workers.cpu_contention:_LONGEST_WAIT_SECONDS",
                "workers.cpu_contention:PATIENCE_SECONDS",
                "tuning.job:_PATIENCE_SHARE",
            ),
            lambda once, in_all, share: (once, in_all, 100 * share),
        ),
    ),
    "Search": (
        Limit("a gain worth a trial", "{:g} %", ("core.speed.stopping:Limits.gain",), per_cent),
        Limit(
            "the optimizer's share from which a fused one is tried",
            "{:g} %",
            ("core.speed.knobs:_OPTIMIZER_SHARE",),
            per_cent,
        ),
        Limit(
            "a smaller batch is preferred within (`--batch max`: within)",
            "{:g} % ({:g} %)",
            (f"{_SPEED}.knee_share", f"{_SPEED}.most_share"),
            per_cent,
        ),
        Limit(
            "memory kept free: on a CPU, the larger of",
            "{:g} % and {:g} MiB",
            ("workers.memory_limit:RESERVE_SHARE", "workers.memory_limit:RESERVE_BYTES"),
            lambda share, size: (100 * share, size / _MIB),
        ),
        Limit(
            "share of an accelerator's free memory that is used",
            "{:g} %",
            ("backends.protocol:USABLE_FREE_MEMORY_SHARE",),
            per_cent,
        ),
        Limit(
            "share of the budget above which a recipe is not tried",
            "{:g} %",
            ("tuning.search.loop:_MEMORY_SHARE",),
            per_cent,
        ),
    ),
    "Comparison": (
        Limit("a turn", "{:g} s", (f"{_SPEED}.turn_seconds",)),
        Limit(
            "a turn this many times slower or faster than the others is timed again",
            "{:g}",
            (f"{_SPEED}.out_of_line_factor",),
        ),
        Limit(
            "a second of tuning is worth a gain of",
            "{:g} %",
            (f"{_SPEED}.gain_per_second",),
            per_cent,
        ),
        Limit(
            "a round's ratio is assumed to be off by",
            "{:g} %",
            (f"{_SPEED}.round_deviation",),
            per_cent,
        ),
        Limit(
            "an interval that is narrow enough, or a quarter of the gain (half: at most)",
            "{:g} % ({:g} %)",
            (f"{_SPEED}.sharp_width", f"{_SPEED}.enough_width"),
            per_cent,
        ),
        Limit(
            "assumed error of a trial's single timing",
            "{:g} %",
            (f"{_SPEED}.search_ratio_error",),
            per_cent,
        ),
        Limit(
            "the comparison's rounds at most",
            "{:g}",
            (f"{_SPEED}.most_rounds",),
        ),
        Limit(
            "a recipe may be the fastest within this share of it",
            "{:.0f} %",
            (f"{_SPEED}.may_be_fastest_share",),
            lambda share: (100 * (1 - share),),
        ),
        Limit(
            "precision that brings less is not chosen",
            "{:g} %",
            (f"{_SPEED}.same_speed_share",),
            per_cent,
        ),
        Limit(
            "gain that rounding beyond the policy must bring",
            "{:g} %",
            (f"{_SPEED}.min_gain",),
            per_cent,
        ),
        Limit(
            "search and final rounds contradict each other: factor between their intervals",
            "{:g}",
            (f"{_SPEED}.contradiction_factor",),
        ),
        Limit(
            "too wide an interval: factor between its ends",
            "{:g}",
            (f"{_SPEED}.wide_interval_factor",),
        ),
        Limit(
            "another machine: a rate that changed by the factor",
            "{:.2f}",
            (f"{_SPEED}.rate_change_factor",),
        ),
    ),
    "Time limit": (
        Limit(
            "shares at which search and checks end",
            "{:g} %, {:g} %",
            ("tuning.time_limit:SEARCH_SHARE", "tuning.time_limit:PROOF_SHARE"),
            per_cent,
        ),
    ),
    "Plan": (
        Limit(
            "launching a kernel: the driver, a framework",
            "{:g} us, {:g} us",
            (
                "core.speed.step_bounds:LAUNCH_SECONDS",
                "core.speed.step_bounds:FRAMEWORK_LAUNCH_SECONDS",
            ),
            micro,
        ),
    ),
}


def limits() -> Iterator[str]:
    """Yield the table, line by line."""
    yield "| stage | limit | value | in `autoprec` |"
    yield "|---|---|---|---|"
    for stage, rows in LIMITS.items():
        for row in rows:
            yield f"| {stage} | {row.what} | {row.text()} | {row.where()} |"
