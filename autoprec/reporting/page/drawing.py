"""Draws in SVG: a plot area with axes, and marks at data coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autoprec.reporting.page.markup import tag, text

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
