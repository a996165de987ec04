"""Where the numbers in the prose of the README and the pages come from, number by number.

A number is a result's, one that a program printed on the same page, or it stands in `REASONS` with
why nothing of this repository can hold it. The tables that `benchmarks.report` makes are not here:
test_report_page.py compares them with the results, and with the constants of the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, CURVES = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "curves"

#: The numbers that a snippet of a page shows, in its order.
Shown = Callable[[], list[float]]


def only(shown: Shown, *which: int) -> Shown:
    """Some of the numbers, by place."""
    return lambda: [shown()[index] for index in which]


def grid_rates() -> Iterator[dict[str, tuple[float, dict[str, Any]]]]:
    """Each recorded grid: a point's text, its rate and itself."""
    for path in CURVES.glob("*/*.json"):
        rows = json.loads(path.read_text(encoding="utf-8"))["grid"]
        yield {
            json.dumps(row["point"], sort_keys=True): (
                row["measurement"]["samples_per_step"] / row["measurement"]["step_seconds"],
                row["point"],
            )
            for row in rows
            if row.get("measurement")
        }


def bfloat16_over_float32() -> list[float]:
    """The least and the most of all recorded grids, at the same batch and settings."""
    found = []
    for grid in grid_rates():
        for rate, point in grid.values():
            if point["policy"] == "mixed_bfloat16":
                alike = json.dumps({**point, "policy": "float32"}, sort_keys=True)
                found += [rate / grid[alike][0]] if alike in grid else []
    return [min(found), max(found)]


def float16_products() -> list[float]:
    """The slowest float16 products that a recorded tuning refused the policy for."""
    text = "".join(p.read_text() for p in RESULTS.glob("oracle-*.jsonl"))
    found = re.findall(r"float16 products are slower than float32's \(measured: ([\d.]+)x", text)
    return [min(map(float, found))]


def truth(task: str) -> Shown:
    """How far bfloat16 ended from float32 in long runs, in per cent, and after how many steps."""

    def shown() -> list[float]:
        folder = ROOT / "tests" / "zoo" / "field"
        row = json.loads((folder / "truth.json").read_text())["tasks"][task]["bfloat16"]
        steps = re.findall(r"^TRUTH_STEPS = (\d+)$", (folder / f"{task}.py").read_text(), re.M)
        return [100 * abs(row["difference"]), *map(float, steps)]

    return shown


def noise_in(null: str) -> Shown:
    """Broken pairs caught and there, healthy ones flagged and there, by this noise."""

    def shown() -> list[float]:
        rows = json.loads((RESULTS / "noise_of_what-2026-11-25.json").read_text())["rows"]
        kinds = [[r for r in rows if r["truth"] == truth] for truth in ("broken", "healthy")]
        return [n for own in kinds for n in (sum(not row[null] for row in own), len(own))]

    return shown


def same_beside_others() -> list[float]:
    """Tasks whose verdict is the same alone and beside busy processes, and all."""
    tasks = json.loads((RESULTS / "same_verdict-2026-11-25.json").read_text())["tasks"]
    return [sum(task["alone"] == task["beside"] for task in tasks), len(tasks)]


def gpt_on_h200(*recipes: tuple[str, bool]) -> Shown:
    """The batch, then a GPT's speed over float32 by policy and whether it was compiled."""

    def shown() -> list[float]:
        text = (RESULTS / "gpu_grid-gpt-2026-11-26-nvidia-h200.jsonl").read_text()
        rows = [row for row in map(json.loads, text.splitlines()) if row.get("over_float32")]
        own = {(r["recipe"]["policy"], r["recipe"]["compile"]): r["over_float32"] for r in rows}
        (batch,) = {row["recipe"]["batch_size"] for row in rows}
        return [batch, *(own[recipe]["ratio"] for recipe in recipes)]

    return shown


def written(path: str, pattern: str) -> Shown:
    """The one number that all the matches in a file have: it is read, for it needs a framework."""

    def shown() -> list[float]:
        (found,) = set(re.findall(pattern, (ROOT / path).read_text(encoding="utf-8")))
        return [float(found)]

    return shown


_GPT = gpt_on_h200(("mixed_bfloat16", False), ("tf32", False), ("mixed_bfloat16", True))

#: By page: a number as it stands there, without the prose around it, and what it is. Constants that
#: decide are not here: docs/method.md has them in a table made from the code.
SOURCES: dict[str, dict[str, Shown]] = {
    "docs/method.md": {
        "72 of 85": only(noise_in("weights"), 0, 1),
        "6 of 255": only(noise_in("weights"), 2, 3),
        "caught 62": only(noise_in("products"), 0),
        "flagged 9": only(noise_in("products"), 2),
        "24 of 24": same_beside_others,
        "20 %": only(truth("variance_of_rows"), 0),
        "step 300": only(truth("variance_of_rows"), 1),
        "12 %": only(truth("physics_informed"), 0),
        "step 500": only(truth("physics_informed"), 1),
    },
    "docs/scale.md": {
        "1e-5": written(
            "tests/backends/torch/distributed/test_wrapping.py",
            r"expected\.losses, rel=([\de-]+)\)",
        ),
    },
    "docs/worth-it.md": {
        "0.34 to 3.61 times": bfloat16_over_float32,
        "0.012 times": float16_products,
        "batch 256": only(_GPT, 0),
        "1.27x": only(_GPT, 1),
        "1.49x": only(_GPT, 2),
        "1.81x": only(_GPT, 3),
    },
}

#: By page: numbers that a program printed, in a fence of the same page.
PRINTED: dict[str, tuple[str, ...]] = {
    "docs/first-hour.md": ("1.63 times", "1.54x", "1.06x", "0.0027 %"),
}

#: By page: numbers that nothing here can hold, and why.
REASONS: dict[str, dict[str, str]] = {
    "docs/method.md": {
        "38x (30-60)": "seen by hand, as the text says there",
        "20x": "seen by hand, as the text says there",
    },
    "docs/migration.md": {"in accelerate 0.16": "a version of accelerate"},
    "docs/scale.md": {"such as `rank 1 of 2:": "an example of an error message"},
}
