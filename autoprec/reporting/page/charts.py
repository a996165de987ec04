"""The charts of a report: throughput, where the gain comes from, losses, gradient exponents."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autoprec.core.dtypes import DType, Policy
from autoprec.core.number_words import times
from autoprec.core.numerics.loss_curves import LossCurves
from autoprec.core.numerics.loss_scale_choice import ScaleEvidence
from autoprec.core.profile import TriedRecipe
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_settings
from autoprec.core.speed.attribution import Part
from autoprec.core.speed.trial_results import Status
from autoprec.reporting.page.markup import tag, text
from autoprec.reporting.text import rate_text, status_text

WIDTH, HEIGHT = 680, 300
#: An axis shorter than this has one tick: its parts are no floats any more.
_NO_LENGTH = 1e-300
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 12, 44
_LEGEND, _LETTER = 16, 7


@dataclass(frozen=True)
class Scale:
    """Maps data in [low, high] to pixels in [start, end], linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(value)
        share = (at - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


@dataclass
class Plot:
    """A plot area with its two scales; marks are added in the order they are drawn."""

    x: Scale
    y: Scale
    height: int = HEIGHT
    parts: list[str] = field(default_factory=list)

    @classmethod
    def over(
        cls,
        xs: tuple[float, float],
        ys: tuple[float, float],
        *,
        log_x: bool = False,
        log_y: bool = False,
        left: int = _LEFT,
        right: int = _RIGHT,
        height: int = HEIGHT,
        legend: Sequence[tuple[str, str]] = (),
    ) -> Plot:
        """Make a plot of data within these limits; a legend of (name, kind of line) lies above."""
        top = _TOP + _LEGEND if legend else _TOP
        plot = cls(
            Scale(*xs, left, WIDTH - right, log_x), Scale(*ys, height - _BOTTOM, top, log_y), height
        )
        at = float(left)
        for name, kind in legend:
            plot.line(at, _TOP - 4, at + 18, _TOP - 4, f"curve {kind}")
            plot.label(at + 24, _TOP, name)
            at += 24 + _LETTER * len(name) + 24
        return plot

    def x_axis(self, ticks: Iterable[tuple[float, str]], title: str) -> None:
        """Draw ticks along the bottom, each at a value with its label, and the axis' title."""
        bottom = self.y.start
        for value, label in ticks:
            at = self.x(value)
            self.line(at, bottom, at, bottom + 4, "axis")
            self.label(at, bottom + 17, label, "middle")
        self.line(self.x.start, bottom, self.x.end, bottom, "axis")
        self.label((self.x.start + self.x.end) / 2, self.height - 8, title, "middle", "title")

    def y_axis(self, ticks: Iterable[tuple[float, str]], title: str) -> None:
        """Draw ticks and a grid along the left side, and the axis' title beside them."""
        for value, label in ticks:
            at = self.y(value)
            self.line(self.x.start, at, self.x.end, at, "grid")
            self.label(self.x.start - 6, at + 4, label, "end")
        middle = (self.y.start + self.y.end) / 2
        turned = {"text_anchor": "middle", "transform": f"rotate(-90 14 {middle:g})"}
        self._add("text", text(title), x=14, y=middle, class_="title", **turned)

    def _add(self, name: str, inside: str = "", **attributes: object) -> None:
        self.parts.append(tag(name, inside, **attributes))

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draw a line between two pixels."""
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)

    def label(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> None:
        """Write words at a pixel."""
        self._add("text", text(words), x=x, y=y, text_anchor=anchor, class_=kind)

    def curve(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through data points."""
        if len(points) > 1:
            path = " ".join(f"{self.x(x):g},{self.y(y):g}" for x, y in points)
            self._add("polyline", points=path, class_=f"curve {kind}")

    def dot(self, x: float, y: float, kind: str, title: str, radius: float = 3.5) -> None:
        """Draw a dot at a data point; `title` is shown by the browser on hovering."""
        said = tag("title", text(title))
        self._add("circle", said, cx=self.x(x), cy=self.y(y), r=radius, class_=kind)

    def cross(self, x: float, pixel_y: float, kind: str, title: str) -> None:
        """Draw a cross at a value of x and a pixel of y."""
        path = f"M{self.x(x) - 4:g} {pixel_y - 4:g}l8 8m0 -8l-8 8"
        self._add("path", tag("title", text(title)), d=path, class_=f"cross {kind}")

    def bar(self, low: float, high: float, top: float, thickness: float, kind: str) -> None:
        """Draw a bar along x between two values, at a pixel of y."""
        left, right = sorted((self.x(low), self.x(high)))
        width = max(1.0, right - left)
        self._add("rect", x=left, y=top, width=width, height=thickness, class_=kind)

    def svg(self, description: str) -> str:
        """Return the drawing; `description` is for those who cannot see it."""
        body, box = "\n".join(self.parts), f"0 0 {WIDTH} {self.height}"
        return tag("svg", f"\n{body}\n", viewBox=box, role="img", aria_label=description)


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round values between two limits, about `count` of them."""
    if not high - low > _NO_LENGTH:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round values between two limits on a logarithmic axis."""
    for steps in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        values = [each * 10.0**power for power in range(first, last + 1) for each in steps]
        ticks = [value for value in values if low * 0.999 <= value <= high * 1.001]
        if len(ticks) >= 3:
            return ticks
    return linear_ticks(low, high)


def labelled(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Return ticks with labels of as many digits as tell them apart."""
    for digits in range(3, 17):
        labels = [short(tick, digits) for tick in ticks]
        if len(set(labels)) == len(ticks):
            break
    return list(zip(ticks, labels, strict=True)) if ticks else []


def short(value: float, digits: int = 3) -> str:
    """Show a tick's value: "1500", "0.25", "2e-06"."""
    whole = 1 <= abs(value) < 1e6 and value == round(value)
    return f"{value:.0f}" if whole else f"{value:.{digits}g}"


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
    # as much as the longest name takes, but half at most
    left = min(WIDTH // 2, 24 + 7 * max(len(what) for what, _, _ in rows))
    plot = Plot.over((lows / 1.05, highs), (0, 1), log_x=True, left=left, right=70, height=height)
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
