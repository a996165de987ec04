"""The documentation: every page is reachable, every link leads somewhere, the README is short."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import autoprec
from autoprec.hardware.catalogue import load_catalogue

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.glob("*.md"),
        ROOT / "profiles/README.md",
        ROOT / "examples/README.md",
    ]
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path, text: str) -> list[str]:
    """The links of a page's text that lead nowhere."""
    found = []
    for link in _LINK.findall(_FENCE.sub("", text)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if link.startswith("https://"):
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page, page.read_text("utf-8")) == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "[a](method.md#limits) [b](#limits) [c](no.md) [d](method.md#none) [e](../README.md)"
    assert broken(DOCS / "verify.md", text) == ["#limits", "no.md", "method.md#none"]


#: The pages that have what a README of five minutes has no room for.
TAKEN_OVER = ("task-file", "apply-pytorch", "apply-keras", "profiles", "reference", "results")


def test_the_readme_is_short_and_leads_to_the_pages_that_took_its_parts() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(readme.encode()) <= 10_000
    linked = {link.partition("#")[0] for link in _LINK.findall(readme)}
    assert {f"docs/{name}.md" for name in TAKEN_OVER} <= linked


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text()
    toctrees = re.findall(r"```{toctree}\n(?::[^\n]*\n)*\n(.*?)```", index, re.S)
    listed = {name for block in toctrees for name in block.split()}
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert listed == pages | {"devices"}  # which the build writes


def test_the_reference_has_every_public_name() -> None:
    text = (DOCS / "reference.md").read_text()
    documented = set(re.findall(r"\.\. auto\w+:: (\w+)$", text, re.M))
    assert set(autoprec.__all__) - {"__version__"} <= documented


def test_the_table_of_devices_has_every_family_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    from device_table import device_page

    rows = re.findall(r"^\| `([^`]+)` \|", device_page(), re.M)
    assert sorted(rows) == sorted(family.name for family in load_catalogue().families)
