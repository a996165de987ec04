"""docs/report.svg: a chart of `autoprec report`, drawn from a recorded tuning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from autoprec.core.codec import from_plain
from autoprec.core.profile import TriedRecipe
from autoprec.core.recipe import Recipe
from autoprec.reporting.page import charts, sections
from benchmarks.checkout import RESULTS
from benchmarks.report import gpu
from benchmarks.report.search import SHOWN

#: The device whose tuning is drawn.
DEVICE = "NVIDIA H200"

#: What the page's style says of a chart's marks; its colours are at its head.
_MARKS = re.compile(r"svg [\w.][^{}]*\{[^{}]*\}")


def picture(folder: Path = RESULTS) -> str:
    """Return the chart as an SVG file's text; `SystemExit` where the tuning is not there."""
    rows = gpu.read(folder).get(DEVICE, {}).get(f"tune-{SHOWN}", ())
    if not rows:
        raise SystemExit(f"{folder}: no tuning of {SHOWN} on an {DEVICE}, expected one to draw")
    row: Any = rows[0]
    tried = [from_plain(TriedRecipe, each) for each in row["evidence"]["tried"]]
    drawn = charts.throughput(tried, from_plain(Recipe, row["recipe"]))
    opening, rest = drawn.split(">", 1)
    given = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    paper = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    return f"{opening} {given}>\n<style>\n{_style()}\n</style>\n{paper}{rest}\n"


def _style() -> str:
    """Return what the page's style says of charts."""
    colours, _, rules = sections.style().strip().partition("* {")
    return "\n".join([colours.strip(), *_MARKS.findall(rules)])
