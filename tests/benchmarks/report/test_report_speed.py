"""The report's table of the overhead says what is promised and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

from benchmark_rows import ratio

from benchmarks.overhead import fit
from benchmarks.report import speed


def test_the_report_of_the_overhead_says_what_is_promised_and_what_is_kept(tmp_path: Path) -> None:
    pairs = [fit.Pair(s, s * 1.02, s, 8) for s in (0.001, 0.005)]
    found = {
        "date": "2026-12-01",
        "family": "amd-zen4",
        "processes": 6,
        "cases": [fit.case(fit.TORCH, "float32", [pair] * 6) for pair in pairs],
        "fixed": [fit.fixed(fit.TORCH, "float32", [pairs] * 6)],
    }
    path = tmp_path / "overhead.json"
    path.write_text(json.dumps(found))
    lines = list(speed.overhead(path))
    assert "stale or not is unknown" in lines[0]
    assert lines[-5].endswith("| +100 us (+100 to +100) | no |")
    assert lines[-6].endswith("| nothing promised |")
    assert lines[-1].endswith("at most 10 us | yes |")
    path.write_text(json.dumps([{**found["cases"][0], "overhead_microseconds": 3.0, **ratio(1)}]))
    assert "One process a case" in "\n".join(speed.overhead(path))
