"""A tuning in a notebook: one line that is updated, and removed when the tuning has ended."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from typing import Any

from autoprec.reporting.status_line import StatusLine
from autoprec.reporting.text import printable
from autoprec.tuning.events import Event, Finished, Note

#: Updating a browser more often than this only makes it flicker.
_UPDATE_SECONDS = 0.2


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel, whose cells show HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class HtmlLine:
    """A line that IPython shows as HTML in place of the previous one."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return f"<pre style='margin:0'>{html.escape(self._text)}</pre>"


class Notebook:
    """Shows a tuning as one line, and its warnings as lines that remain.

    `display` is IPython's: called with `display_id=True` it returns a handle with `update`.
    """

    def __init__(
        self, display: Callable[..., Any] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._display = display or _ipython_display()
        self._clock = clock
        self._status_line = StatusLine(clock=clock)
        self._handle: Any = None
        self._due = 0.0

    def __call__(self, event: Event) -> None:
        """Show one event."""
        self._status_line(event)
        if isinstance(event, Note) and event.warning:
            self._display(HtmlLine(printable(f"warning: {event.text}")))
        if self._clock() >= self._due or isinstance(event, Finished):
            self._due = self._clock() + _UPDATE_SECONDS
            text = "" if isinstance(event, Finished) else self._status_line.text
            self._show(HtmlLine(printable(text)))

    def _show(self, line: HtmlLine) -> None:
        if self._handle is None:
            self._handle = self._display(line, display_id=True)
        else:
            self._handle.update(line)


def _ipython_display() -> Callable[..., Any]:
    from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

    shown: Callable[..., Any] = display
    return shown
