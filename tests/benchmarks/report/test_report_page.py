"""The pages, their tables and the picture are what the report makes of results and constants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import page
from benchmarks.report.measured import measured


def test_the_pages_are_what_the_report_makes_of_the_results() -> None:
    """So a result that has become stale is marked as such: the report says it, and must be run."""
    again = "run python -m benchmarks.report and commit what it writes"
    unknown = "stale or not is unknown"
    made = page.files()
    text, kept = made.pop(page.PAGE), page.PAGE.read_text(encoding="utf-8")
    pairs = list(zip(text.splitlines(), kept.splitlines(), strict=False))
    assert len(text.splitlines()) == len(kept.splitlines()), again
    assert [p for p in pairs if p[0] != p[1] and unknown not in p[0]] == [], again
    others = {path for path, own in made.items() if path.read_text(encoding="utf-8") != own}
    assert others == set(), again
    beyond = [p[1] for p in pairs if p[0] != p[1]]
    if beyond:
        pytest.skip(f"stale unknown: this copy has not the history that {beyond} speaks of")


def test_runs_that_no_line_of_a_section_names_are_named_below_it(tmp_path: Path) -> None:
    for name in ("growth-2026-12-01.json", "growth-2026-12-02.json", "growth_of-2026-12-01.json"):
        (tmp_path / name).write_text("{}")
    shown = ["data: `benchmarks/results/growth-2026-12-02.json`."]
    named = list(page.left_out("growth", "json", shown, tmp_path))
    assert named[0].endswith("not shown, in the same folder: `growth-2026-12-01.json`.")
    both = [*shown, "`growth-2026-12-01.json`"]
    assert list(page.left_out("growth", "json", both, tmp_path)) == []


def test_a_gpus_ratio_over_float32_as_it_was_run_says_that_it_is_of_the_host(
    tmp_path: Path,
) -> None:
    row = {"task": "gpt", "claimed": {"ratio": 6.11}, "applied": {"ratio": 4.33}}
    for family, device in (("nvidia-h200", "NVIDIA H200"), ("amd-zen5", "AMD EPYC")):
        found = {"family": family, "device": device, "rows": [row]}
        (tmp_path / f"applied-2026-12-01-{family}.json").write_text(json.dumps(found))
    (line,) = page.host_bound(tmp_path)
    assert line.startswith("NVIDIA H200: ")
    assert "gpt was said to be 6.11x and found at 4.33x on another host" in line


def test_the_table_of_machines_is_made_of_the_results(tmp_path: Path) -> None:
    results, recordings = tmp_path / "results", tmp_path / "recordings"
    for folder in (results, recordings):
        folder.mkdir()
    for name, found in (
        ("growth-2026-12-01.json", {"family": "amd-zen4"}),
        ("growth-2026-12-02.json", {"family": "amd-zen4"}),
        ("overhead-2026-12-02.json", {"family": "amd-zen5", "cases": [{"way": "torch loop"}]}),
        ("soak-2026-12-01.json", {}),
        ("replay-2026-12-01.json", {}),
    ):
        (results / name).write_text(json.dumps(found))
    (recordings / "amd-zen3.json").write_text(json.dumps({"synthetic": False}))
    (recordings / "amd-zen4.json").write_text(json.dumps({"synthetic": True}))
    assert list(measured(results, recordings))[2:] == [
        "| Zen 5 | the cost of `apply_profile` (torch loop): 2026-12-02 |",
        "| Zen 4 | how tuning time grows: 2026-12-02 |",
        "| Zen 3 | probe recorded |",
        "| machine not kept | faults: 2026-12-01 |",
    ]


def test_a_table_without_a_place_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no place for the table 'machines'"):
        page.with_table("a README", "machines", ["| a |"])
