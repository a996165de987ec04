"""No file of Python is longer than a reader takes in: 400 lines."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("autoprec", "benchmarks", "docs", "examples", "tests")
MOST_LINES = 400


def test_every_file_is_short_enough() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 500
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}
