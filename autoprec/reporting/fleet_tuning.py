"""A tuning on a cluster on the terminal: each device type's lines begin with its name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoprec.core.fleet.node_types import FleetResult, TypeResult
from autoprec.core.profile import Profile
from autoprec.reporting.closing_sentence import headline
from autoprec.reporting.text import printable
from autoprec.reporting.tune import Terminal
from autoprec.tuning.events import Event, Finished

_WIDTH = 140


class FleetTerminal:
    """Shows the tunings of several types on stderr, each line with the name of its type."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminals: dict[str, Terminal] = {}

    def __call__(self, name: str, event: Event) -> None:
        """Show one event of the tuning of a type."""
        if isinstance(event, Finished):
            return  # the table at the end has every result
        if name not in self._terminals:
            stream = _Prefixed(self._stream, f"{name}: " if name else "")
            console = Console(file=stream, highlight=False, width=_WIDTH)  # type: ignore[arg-type]
            self._terminals[name] = Terminal(Path(), closing=False, console=console)
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


def print_fleet_result(result: FleetResult, folder: Path, console: Console | None = None) -> None:
    """Print how each type ended, and where its profile is; by default on stderr."""
    console = console or _console()
    table = Table(box=None, pad_edge=False)
    for name in ("type", "nodes", "result"):
        table.add_column(name, overflow="fold")
    for each in result.types:
        style = "" if each.profile is not None else "red" if each.failed else "yellow"
        cells = (each.type.name, str(len(each.type.nodes)), _result(each))
        table.add_row(*(Text(printable(cell), style=style) for cell in cells))
    for node in result.unfit:
        cells = ("", "1", f"{node.name} is left out: {node.problem}")
        table.add_row(*(Text(printable(cell), style="yellow") for cell in cells))
    console.print(table)
    made = sum(each.profile is not None for each in result.types)
    said = f"{made} profile{'s' if made != 1 else ''} in {folder}; apply_profile takes the folder"
    console.print(Text(printable(said), style="bold"), soft_wrap=True)


def _console() -> Console:
    console = Console(stderr=True, highlight=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=_WIDTH)


def _result(result: TypeResult) -> str:
    if result.profile is None:
        return result.reason
    return f"{result.file}: {_summary(result.profile)}"


def _summary(profile: Profile) -> str:
    evidence = profile.evidence
    if profile.device.fingerprint.rehearsal or evidence.speedup.rounds == 0:
        return f"{profile.describe_recipe()}: {evidence.reason}"
    return headline(profile)
