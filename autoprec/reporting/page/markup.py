"""Writes HTML. What comes from a profile is escaped; every number keeps its exact value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from autoprec.reporting.text import printable


def text(value: object) -> str:
    """Escape text from a profile, which anybody may have written."""
    return escape(printable(str(value)))


def number(value: float, shown: str) -> str:
    """Show a number as `shown`, with its value as the profile has it for whoever reads the page."""
    return f'<data value="{value!r}">{text(shown)}</data>'


def shown(value: float | None, words: Callable[[Any], str]) -> str:
    """Show a number in words; nothing if it is not known."""
    return "" if value is None else number(value, words(value))


def section(title: str, *parts: str) -> str:
    """Return a section with a heading; nothing if all its parts are empty."""
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{text(title)}</h2>\n{body}\n</section>" if body else ""


def paragraph(html: str) -> str:
    """Return a paragraph of HTML; nothing if that is empty."""
    return f"<p>{html}</p>" if html else ""


def listed(items: Iterable[str]) -> str:
    """Return a list of HTML items; nothing if there are none."""
    rows = "".join(f"<li>{item}</li>" for item in items)
    return f"<ul>{rows}</ul>" if rows else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table of HTML cells; columns in `numbers` are aligned to the right."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if index in numbers else ''}>{cell}</{tag}>"
            for index, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    if not body:
        return ""
    top = f"<thead><tr>{cells([text(name) for name in head], 'th')}</tr></thead>" if head else ""
    return f'<div class="wide"><table>{top}<tbody>\n{body}\n</tbody></table></div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names, which are ours, and HTML values; empty values are left out."""
    body = "\n".join(f"<tr><th>{text(n)}</th><td>{value}</td></tr>" for n, value in rows if value)
    return f'<table class="facts"><tbody>\n{body}\n</tbody></table>' if body else ""


def figure(drawing: str, caption: str) -> str:
    """Return a drawing with its caption, which is HTML; nothing without a drawing."""
    if not drawing:
        return ""
    return f'<figure><div class="wide">{drawing}</div><figcaption>{caption}</figcaption></figure>'
