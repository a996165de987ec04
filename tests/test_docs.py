"""The documentation site: every page is reachable, and what is generated is complete."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import autoprec
from autoprec.hardware.catalogue import load_catalogue

DOCS = Path(__file__).parent.parent / "docs"


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
