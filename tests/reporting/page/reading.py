"""Reads a page back: its tags, its numbers, and its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html.parser import HTMLParser

INLINE = {"data", "strong", "code", "span"}


class Reader(HTMLParser):
    """Collects what is in a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.numbers: list[float] = []
        self.words: list[str] = []
        self.headings: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._open.append(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}
        if tag not in INLINE:
            self.words.append(" ")
        if tag == "data":
            self.numbers.append(float(dict(attrs)["value"] or ""))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words.append(data)
        if self._open[-1:] == ["h2"]:
            self.headings.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def numbers_in(value: object) -> Iterator[float]:
    """Yield every number of a profile's plain values."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from numbers_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
