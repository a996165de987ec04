"""A cluster on the terminal: its tunings, their results, and `autoprec fleet status`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from autoprec.core.fleet.node_types import FleetResult
from autoprec.core.fleet.status import FleetStatus, TypeStatus
from autoprec.core.number_words import rate_number
from autoprec.core.profile import Profile
from autoprec.core.recipe_words import describe_recipe
from autoprec.reporting.closing_sentence import headline
from autoprec.reporting.tables import make_console, say, table
from autoprec.reporting.text import printable
from autoprec.reporting.tune import Terminal
from autoprec.tuning.events import Event, Finished

_WIDTH = 140


class FleetTerminal:
    """Shows the tunings of several types on stderr, each line with the name of its type."""

    def __init__(self) -> None:
        self._terminals: dict[str, Terminal] = {}

    def __call__(self, name: str, event: Event) -> None:
        """Show one event of the tuning of a type."""
        if isinstance(event, Finished):
            return  # the table at the end has every result
        if name not in self._terminals:
            stream = _Prefixed(sys.stderr, f"{name}: " if name else "")
            console = Console(file=stream, highlight=False, width=_WIDTH)  # type: ignore[arg-type]
            self._terminals[name] = Terminal(closing=False, console=console)
        self._terminals[name](event)


class _Prefixed:
    """A stream that begins every line with a prefix."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix, self._rest = stream, prefix, ""

    def write(self, text: str) -> int:
        """Write the lines that are complete."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._stream.write(f"{self._prefix}{line}\n")
        return len(text)

    def flush(self) -> None:
        """Let what was written be seen."""
        self._stream.flush()


def print_fleet_result(result: FleetResult, folder: Path) -> None:
    """Print on stderr how each type ended, and where its profile is."""
    console = make_console(stderr=True, width=_WIDTH)
    rows = []
    for each in result.types:
        style = "" if each.profile is not None else "red" if each.failed else "yellow"
        ended = each.reason
        if each.profile is not None:
            ended = f"{each.file}: {_summary(each.profile)}"
        rows.append((style, each.type.name, str(len(each.type.nodes)), ended))
    for node in result.unfit:
        rows.append(("yellow", "", "1", f"{node.name} is left out: {node.problem}"))
    styled = ([Text(printable(cell), style=style) for cell in cells] for style, *cells in rows)
    console.print(table(["type", "nodes", "result"], styled))
    count = sum(each.profile is not None for each in result.types)
    plural = "" if count == 1 else "s"
    say(console, f"{count} profile{plural} in {folder}; apply_profile takes the folder", "bold")


def _summary(profile: Profile) -> str:
    evidence = profile.evidence
    if profile.device.fingerprint.rehearsal or evidence.over_baseline.rounds == 0:
        return f"{profile.describe_recipe()}: {evidence.reason}"
    return headline(profile)


# Status -----------------------------------------------------------------------------------------


def print_fleet_status(status: FleetStatus) -> None:
    """Print the table, the software that differs, and what to verify."""
    console = make_console(width=_WIDTH)
    priced = any(row.price_per_hour is not None for row in status.types)
    prices = [">price/hour", ">samples/price"] if priced else []
    names = ["profile", "device", "recipe", ">age", ">samples/s", *prices, "verify"]
    console.print(table(names, (_cells(row, priced) for row in status.types)))
    for each in status.drift:
        say(console, f"versions differ: {each}", "yellow")
    for row in status.types:
        for reason in row.verify:
            say(console, f"verify {row.file} again: {reason}", "yellow")


def _cells(row: TypeStatus, priced: bool) -> list[str]:
    made = row.fingerprint
    name = row.device if row.device == made.family else f"{row.device} ({made.family})"
    rate = row.samples_per_second
    cells = [
        row.file,
        name,
        describe_recipe(row.recipe),
        "unknown" if row.age_days is None else _age_text(row.age_days),
        "" if rate is None else rate_number(rate),
    ]
    if priced:
        price, bought = row.price_per_hour, row.samples_per_price
        cells += ["" if price is None else f"{price:g}", "" if bought is None else f"{bought:.3g}"]
    return [*cells, "again" if row.verify else ""]


def _age_text(days: float) -> str:
    """Show an age in the unit that suits it: "5 h", "12 days"."""
    if days < 1:
        return f"{max(0.0, days) * 24:.0f} h"
    return f"{days:.0f} day{'s' if round(days) != 1 else ''}"
