"""The table of `autoprec fleet status`: one row a device type."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoprec.core.fleet.status import FleetStatus, TypeStatus
from autoprec.core.number_words import rate_number
from autoprec.core.recipe_words import describe_recipe
from autoprec.reporting.text import printable

_WIDTH = 140


def print_fleet_status(status: FleetStatus, console: Console | None = None) -> None:
    """Print the table, the software that differs, and what to verify; by default on stdout."""
    console = console or _console()
    console.print(_table(status))
    for each in status.drift:
        console.print(_line(f"versions differ: {each}", "yellow"))
    for row in status.types:
        for reason in row.verify:
            console.print(_line(f"verify {row.file} again: {reason}", "yellow"))


def _console() -> Console:
    """Make a console on stdout, wide enough for the table if that is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _table(status: FleetStatus) -> Table:
    priced = any(row.price_per_hour is not None for row in status.types)
    table = Table(box=None, pad_edge=False)
    for name in ("profile", "device", "recipe"):
        table.add_column(name)
    for name in ("age", "samples/s", *(("price/hour", "samples/price") if priced else ())):
        table.add_column(name, justify="right")
    table.add_column("verify")
    for row in status.types:
        table.add_row(*(_line(cell) for cell in _cells(row, priced)))
    return table


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
