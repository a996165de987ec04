"""The rows of `benchmarks.profiles.newcomer` as a table, without the framework that trains them."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

HEAD = (
    "| task | trained | recipe | updates | samples | test accuracy, mean | over the seeds |",
    "|---|---|---|---|---|---|---|",
)


def accuracies(row: Mapping[str, Any]) -> list[float]:
    """The accuracy of each seed."""
    return [run["accuracy"] for run in row["runs"]]


def in_a_line(row: Mapping[str, Any]) -> str:
    """A row of the table, as a page shows it."""
    found, run, recipe = accuracies(row), row["runs"][0], row.get("recipe")
    applied = ""
    if recipe:
        applied = f"{recipe['policy']}, batch {recipe['batch_size']}"
        steps = recipe.get("accumulation_steps", 1)
        applied += f" x {steps}" if steps > 1 else ""
    return (
        f"| {row['task']} | {row['side']} | {applied} | {run['updates']} | {run['samples']} | "
        f"{mean(found):.1%} | {min(found):.1%} to {max(found):.1%} |"
    )
