"""No program of the benchmarks is longer than a file may be."""

from __future__ import annotations

from benchmarks.checkout import BENCHMARKS


def test_every_program_fits_in_a_file() -> None:
    for path in BENCHMARKS.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 400, path
