"""The charts of a report: throughput, where the gain comes from, losses, gradient exponents."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from autoprec.core.dtypes import DType, Policy
from autoprec.core.number_words import times
from autoprec.core.numerics.loss_curves import LossCurves
from autoprec.core.numerics.loss_scale import ScaleEvidence
from autoprec.core.profile import TriedRecipe
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_settings
from autoprec.core.speed.attribution import Part
from autoprec.core.speed.noise import Ratio
from autoprec.core.speed.trial_results import Status
from autoprec.reporting.page.drawing import WIDTH, Plot, labelled, linear_ticks, log_ticks
from autoprec.reporting.text import rate_text, status_text

_NO_ROOM = (Status.OUT_OF_MEMORY, Status.WOULD_NOT_FIT)


def throughput(tried: Sequence[TriedRecipe], chosen: Recipe) -> str:
    """Draw samples a second over the batch: each policy's best as a line, every recipe as a dot.

    Recipes that did not run are crosses below; the chosen one has a ring.
    """
    ran = [each for each in tried if each.samples_per_second > 0]
    if not ran:
        return ""
    failed = [each for each in tried if each.status is not Status.OK]
    sizes = sorted({each.batch_size for each in tried})
    top = max(each.samples_per_second for each in ran)
    best: dict[Policy, dict[int, float]] = defaultdict(dict)
    for each in ran:
        known = best[each.policy].get(each.batch_size, 0.0)
        best[each.policy][each.batch_size] = max(known, each.samples_per_second)
    plot = Plot.over(
        (sizes[0] / 1.2, sizes[-1] * 1.2),
        (0.0, 1.06 * top),
        log_x=True,
        legend=[(policy.value, policy.value) for policy in best],
    )
    plot.y_axis(labelled(linear_ticks(0.0, top)), "samples/s")
    plot.x_axis([(size, str(size)) for size in sizes], "batch on one device")
    for policy, rates in best.items():
        plot.curve(sorted(rates.items()), policy.value)
    for each in ran:
        words = f"{_name(each)}: {rate_text(each.samples_per_second)}"
        plot.dot(each.batch_size, each.samples_per_second, each.policy.value, words)
        if _is(each, chosen):
            plot.dot(each.batch_size, each.samples_per_second, "ring", f"chosen: {words}", 8)
    rows = {policy: index for index, policy in enumerate(sorted({e.policy for e in failed}))}
    for each in failed:
        at = plot.y.start - 8 - 11 * rows[each.policy]
        why = f"{_name(each)}: {status_text(each.status)}: {each.reason}"
        plot.cross(each.batch_size, at, each.policy.value, why)
        if each.status in _NO_ROOM:
            plot.label(plot.x(each.batch_size) + 7, at + 4, "OOM", kind="small")
    return plot.svg("throughput over batch size, by policy")


def _name(each: TriedRecipe) -> str:
    parts = [each.policy.value, f"batch {each.batch_size}", each.settings]
    return ", ".join(part for part in parts if part)


def _is(each: TriedRecipe, chosen: Recipe) -> bool:
    return (each.policy, each.batch_size, each.settings) == (
        chosen.policy,
        chosen.batch_size,
        describe_settings(chosen.settings),
    )


def waterfall(parts: Sequence[Part], whole: Ratio) -> str:
    """Draw the parts of a speed-up as bars from 1, with their intervals, and their product."""
    rows = [(part.what, part.speedup, "part") for part in parts] + [("in all", whole, "whole")]
    lows = min(1.0, *(ratio.low for _, ratio, _ in rows))
    highs = max(1.0, *(ratio.high for _, ratio, _ in rows))
    if not 0 < lows < highs:
        return ""
    thick, step = 16, 30
    height = step * len(rows) + 64
    plot = Plot.over(
        (lows / 1.05, highs), (0, 1), log_x=True, left=_label_width(rows), right=70, height=height
    )
    plot.x_axis([(tick, f"{tick:g}x") for tick in log_ticks(lows, highs)], "speed-up")
    for index, (what, ratio, kind) in enumerate(rows):
        top = 14 + step * index
        plot.bar(1.0, ratio.ratio, top, thick, kind)
        middle = top + thick / 2
        plot.line(plot.x(ratio.low), middle, plot.x(ratio.high), middle, "whisker")
        plot.label(plot.x.start - 8, middle + 4, what, "end")
        end = plot.x(max(ratio.high, 1.0)) + 6
        plot.label(end, middle + 4, times(ratio.ratio), kind="small")
    one = plot.x(1.0)
    plot.line(one, 8, one, plot.y.start, "axis")
    return plot.svg("; ".join(f"{what} {ratio.in_words()}" for what, ratio, _ in rows))


def _label_width(rows: Sequence[tuple[str, Ratio, str]]) -> int:
    """Return the pixels left of the bars: as much as the longest name takes, but half at most."""
    return min(WIDTH // 2, 24 + 7 * max(len(what) for what, _, _ in rows))


def losses(curves: LossCurves, candidate: str) -> str:
    """Draw the loss of float32, of the candidate, and of float32 with noise."""
    lines = {
        "float32": curves.float32,
        candidate: curves.candidate,
        "float32 with noise": curves.noise,
    }
    series = {
        name: [(s, loss) for s, loss in zip(curves.steps, values, strict=False) if loss is not None]
        for name, values in lines.items()
    }
    every = [loss for points in series.values() for _, loss in points]
    if len(every) < 2:
        return ""
    low, high = min(every), max(every)
    logarithmic = low > 0 and high > 10 * low
    pad = 0.05 * (high - low) or abs(high) or 1.0
    limits = (low / 1.1, high * 1.1) if logarithmic else (low - pad, high + pad)
    kinds = dict(zip(series, ("reference", "candidate", "noise"), strict=True))
    plot = Plot.over(
        (0, max(1, curves.steps[-1])),
        limits,
        log_y=logarithmic,
        legend=[(name, kind) for name, kind in kinds.items() if series[name]],
    )
    plot.y_axis(labelled(log_ticks(*limits) if logarithmic else linear_ticks(*limits)), "loss")
    plot.x_axis(labelled(linear_ticks(0, max(1, curves.steps[-1]))), "step")
    for name in ("float32 with noise", "float32", candidate):
        plot.curve(series[name], kinds[name])
    return plot.svg("loss over training steps")


def gradient_exponents(evidence: ScaleEvidence, scale: float) -> str:
    """Draw where gradients lie, as exponents of two, and where the loss scale puts them."""
    low, high = evidence.smallest_gradient, evidence.largest_gradient
    if low is None or high is None:
        return ""
    up = math.log2(scale)
    limits = DType.FLOAT16.limits
    bottom, top = limits.min_exponent - limits.mantissa_bits, limits.max_exponent + 1
    edge = (min(low, bottom) - 2, max(high + up, top) + 2)
    plot = Plot.over(edge, (0, 1), left=150, height=150)
    for index, (name, left, right, kind) in enumerate(
        [
            ("float16 holds", bottom, top, "range"),
            ("gradients", low, high + 1, "part"),
            ("at the loss scale", low + up, high + 1 + up, "whole"),
        ]
    ):
        at = 12 + 28 * index
        plot.bar(left, right, at, 16, kind)
        plot.label(plot.x.start - 8, at + 12, name, "end")
    plot.x_axis([(t, f"2^{t:g}") for t in linear_ticks(*edge, 8)], "magnitude")
    return plot.svg(f"gradients from 2^{low} to 2^{high}, loss scale 2^{up:g}")
