"""Every number of the README and the pages that says how much is a result's or a constant's."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from documented_numbers import PRINTED, REASONS, ROOT, SOURCES, Shown

#: All but those that are made from results or from the catalogue.
MADE = {"docs/results.md", "docs/devices.md"}
PAGES = ("README.md", *sorted({f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")} - MADE))

_UNIT = r"(?:(?:x|ms|us|s|seconds?|minutes?|hours?|GiB|MiB|GB|MB|times|TFLOPS|samples/s)\b|%)"
_FREE, _COUNT = r"(?<![\w.^*`-])", r"\d+(?:,\d{3})*"
#: A number with a unit, a count out of another one, and a share as a decimal.
NUMBER = re.compile(
    rf"{_FREE}(?:"
    rf"\d[\d,]*(?:\.\d+)?(?:(?:-| to )\d[\d.]*)?\s?{_UNIT}"
    rf"|{_COUNT} (?:out )?of (?:[\w']+ ){{0,3}}{_COUNT}"
    r"|(?:\d[\d.]*(?:-| to ))?0\.\d+(?!\d|\.\d)"
    r"|\d(?:\.\d+)?e-\d+)"
)
#: Any number in a snippet, also one that says nothing of the kind by itself.
ANY = re.compile(rf"(?:{_FREE}|(?<=\d-)){_COUNT}(?:\.\d+)?(?:e-\d+)?")
_FENCE = re.compile(r"```.*?```", re.DOTALL)
_MADE = re.compile(r"<!-- (\w+): made by.*?<!-- end of \1 -->", re.DOTALL)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """The text without programs, what they printed, and generated tables; in single spaces."""
    return " ".join(_MADE.sub(" ", _FENCE.sub(" ", text)).split())


def spans(text: str, snippets: Iterator[str]) -> Iterator[range]:
    for snippet in snippets:
        for found in re.finditer(re.escape(snippet), text):
            yield range(found.start(), found.end())


def snippets_of(page: str) -> Iterator[str]:
    yield from SOURCES.get(page, {})
    yield from PRINTED.get(page, ())
    yield from REASONS.get(page, {})


def untraced(text: str, snippets: Iterator[str]) -> list[str]:
    """The numbers that no snippet holds, with some words around them."""
    known = list(spans(text, snippets))
    return [
        text[max(0, found.start() - 40) : found.end() + 20]
        for found in NUMBER.finditer(text)
        if not any(found.start() in span for span in known)
    ]


def as_shown(value: float, like: str) -> str:
    """The value with as many decimals as the text has, or as a power of ten where it has one."""
    if "e-" in like:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.{len(like.partition('.')[2])}f}"


def numbers_of(snippet: str) -> list[str]:
    """All the numbers in a snippet, a range's both ends."""
    return ANY.findall(snippet)


@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_traced(page: str) -> None:
    assert untraced(prose(text_of(page)), snippets_of(page)) == []


FOUND = "It is 3.2x faster, 10 to 20 % of 5 ms, and 7 GiB; a batch of 32 in `0.5x` and torch 2.13."
COUNTED = (
    "97 of the zoo's 113 pairs, 6 of 255, a share of 0.85, within 1e-4; 5 tasks of torch 2.13.0"
)


def test_the_search_for_numbers_finds_some() -> None:
    assert untraced(FOUND, iter(("3.2x",))) != untraced(FOUND, iter(()))
    assert [found[0] for found in NUMBER.finditer(FOUND)] == ["3.2x", "10 to 20 %", "5 ms", "7 GiB"]
    counted = ["97 of the zoo's 113", "6 of 255", "0.85", "1e-4"]
    assert [found[0] for found in NUMBER.finditer(COUNTED)] == counted


def test_every_number_of_a_snippet_is_compared() -> None:
    assert numbers_of("said 38x (30-60), 103 without") == ["38", "30", "60", "103"]
    assert numbers_of("float32 within 1e-5, 2,000 of 1.50") == ["1e-5", "2,000", "1.50"]
    assert [as_shown(1e-4, "1e-4"), as_shown(0.849, "0.85")] == ["1e-4", "0.85"]


@pytest.mark.parametrize(
    ("page", "snippet", "shown"),
    [(page, text, shown) for page, own in SOURCES.items() for text, shown in own.items()],
)
def test_a_number_is_what_its_source_says(page: str, snippet: str, shown: Shown) -> None:
    assert snippet in prose(text_of(page))
    values, texts = shown(), numbers_of(snippet)
    assert len(values) == len(texts)
    assert [as_shown(v, t) for v, t in zip(values, texts, strict=True)] == texts


@pytest.mark.parametrize("page", PRINTED)
def test_a_number_that_was_printed_is_on_the_page(page: str) -> None:
    printed = "\n".join(_FENCE.findall(text_of(page)))
    for snippet in PRINTED[page]:
        assert snippet in prose(text_of(page))
        for number in numbers_of(snippet):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", printed), snippet


def test_the_allow_list_holds_nothing_that_is_gone() -> None:
    for page, own in REASONS.items():
        assert [text for text in own if text not in prose(text_of(page))] == []
    assert sum(map(len, REASONS.values())) <= 10
