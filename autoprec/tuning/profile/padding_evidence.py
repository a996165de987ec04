"""What a profile says of dimensions that are not multiples of what the device wants."""

from __future__ import annotations

from dataclasses import replace

from autoprec.core.number_words import times
from autoprec.core.profile import MisalignedDimension
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import point_key
from autoprec.tuning.stage_results import TuningResult


def significant(value: float) -> float:
    """Return a number to six significant digits."""
    return float(f"{value:.6g}")


def rounded(ratio: Ratio) -> Ratio:
    """Return a ratio and its interval to four decimal places."""
    return replace(
        ratio, ratio=round(ratio.ratio, 4), low=round(ratio.low, 4), high=round(ratio.high, 4)
    )


def padding_evidence(result: TuningResult, recipe: Recipe) -> tuple[MisalignedDimension, ...]:
    """Return every misaligned dimension, and the speed with and without padding, if measured."""
    multiple = recipe.alignment.multiple if recipe.alignment.modules else result.preflight.alignment
    gain = padding_gain(result)
    return tuple(
        MisalignedDimension(
            d.module, d.kind, d.name, d.size, -(-d.size // multiple) * multiple, gain
        )
        for d in result.preflight.task.dimensions
        if d.size % multiple
    )


def padding_gain(result: TuningResult) -> float | None:
    """Return the best speedup among trials that differ in the padding alone, None without any."""
    rates = {point_key(o.point): o.rate for o in result.trials.history if o.rate > 0}
    ratios = [
        o.rate / plain
        for o in result.trials.history
        if o.rate > 0
        and o.point.get("alignment", 1) != 1
        and (plain := rates.get(point_key({**o.point, "alignment": 1})))
    ]
    return significant(max(ratios)) if ratios else None


def describe_padding_trials(result: TuningResult) -> str:
    """Say what came of padding: measured, tried or not worth a trial."""
    gain = padding_gain(result)
    if gain is not None and not result.preflight.rehearsed:
        return f"was measured at {times(gain)} and not chosen"
    tried = any(o.point.get("alignment", 1) != 1 for o in result.trials.history)
    return "was tried and not chosen" if tried else "was not worth a trial"
