"""Writes HTML. What comes from a profile is escaped; every number keeps its exact value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from autoprec.reporting.text import printable


def text(value: object) -> str:
    """Escape text from a profile, which anybody may have written."""
    return escape(printable(str(value)))


def tag(name: str, inside: str = "", **attributes: object) -> str:
    """Return an element around HTML; numbers are rounded, `class_` and `text_anchor` are names."""
    given = ""
    for key, value in attributes.items():
        shown = f"{value:g}" if isinstance(value, int | float) else text(value)
        given += f' {key.rstrip("_").replace("_", "-")}="{shown}"'
    return f"<{name}{given}>{inside}</{name}>" if inside else f"<{name}{given}/>"


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


def listed(items: Iterable[str]) -> str:
    """Return a list of HTML items; nothing if there are none."""
    rows = "".join(f"<li>{item}</li>" for item in items)
    return f"<ul>{rows}</ul>" if rows else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table of HTML cells; columns in `numbers` are aligned to the right."""

    def line(row: Sequence[str], kind: str) -> str:
        right = [" class=n" if index in numbers else "" for index in range(len(row))]
        cells = zip(row, right, strict=True)
        return f"<tr>{''.join(f'<{kind}{look}>{cell}</{kind}>' for cell, look in cells)}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    top = line([text(name) for name in head], "th")
    return (
        f'<div class="wide"><table><thead>{top}</thead><tbody>\n{body}\n</tbody></table></div>'
        if body
        else ""
    )


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names, which are ours, and HTML values; empty values are left out."""
    body = "\n".join(f"<tr><th>{text(n)}</th><td>{value}</td></tr>" for n, value in rows if value)
    return f'<table class="facts"><tbody>\n{body}\n</tbody></table>' if body else ""


def figure(drawing: str, caption: str) -> str:
    """Return a drawing with its caption, which is HTML; nothing without a drawing."""
    if not drawing:
        return ""
    return f'<figure><div class="wide">{drawing}</div><figcaption>{caption}</figcaption></figure>'
