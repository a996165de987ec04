"""What reports print with: a console, a line, a table. Foreign text cannot control a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoprec.reporting.text import printable


def make_console(*, stderr: bool = False, width: int = 120) -> Console:
    """Make a console on stdout or stderr; if that is no terminal, `width` characters wide."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=width)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line, which a terminal wraps by itself."""
    console.print(Text(printable(text), style=style), soft_wrap=True)


def table(
    names: Sequence[str], rows: Iterable[Sequence[str | Text]], *, title: str = "", **look: Any
) -> Table:
    """Return a table without lines; a column whose name begins with ">" is aligned to the right.

    A cell is a text, or a rich `Text` if it has a style. `look` is rich's.
    """
    plain: dict[str, Any] = {"box": None, "pad_edge": False, "title_justify": "left"}
    made = Table(title=title or None, **{**plain, **look})
    for name in names:
        right = name.startswith(">")
        made.add_column(
            Text(printable(name.removeprefix(">"))),
            justify="right" if right else "left",
            overflow="fold",
        )
    for row in rows:
        cells = (cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row)
        made.add_row(*cells)
    return made
