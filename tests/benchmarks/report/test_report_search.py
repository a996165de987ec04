"""The report's tables of tunings, from the newest rows of every machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmark_rows import row

from benchmarks.report import search
from benchmarks.report.latest import latest


def write_rows(folder: Path, name: str, rows: list[Any]) -> None:
    (folder / name).write_text("".join(f"{json.dumps(each)}\n" for each in rows))


def test_the_readme_has_the_worst_machine_beside_the_best_and_counts_runs(tmp_path: Path) -> None:
    write_rows(tmp_path, "oracle-2026-12-01-a.jsonl", [row(best=1.01), row("lstm")])
    write_rows(tmp_path, "oracle-2026-12-02-b.jsonl", [row(family="amd-zen5", best=0.9)])
    write_rows(tmp_path, "oracle-2026-12-02-c.jsonl", [row(family="intel-amx", best=0.95)])
    write_rows(tmp_path, "oracle-2026-11-01-a.jsonl", [row(best=0.5)])  # an earlier run
    found = [(r["task"], r["family"]) for r in search.best_and_worst(tmp_path)]
    assert found == [("lstm", "amd-zen4"), ("mlp", "amd-zen4"), ("mlp", "amd-zen5")]
    assert search.runs_of("mlp", tmp_path) == 4
    text = "\n".join(search.oracle_summary(tmp_path))
    assert "| mlp | Zen 5, 2026-12-01 | 4 | 0.900" in text


def test_what_was_measured_again_stands_below_its_run_and_in_no_mean(tmp_path: Path) -> None:
    versions = {"torch": "2.13.0", "keras": "3.15.1", "tensorflow": "2.21.0"}
    again = {**row("lstm", best=1.05), "commit": "later"}
    rows = [{**row(best=1.01), **versions}, row("lstm", best=0.8)]
    write_rows(tmp_path, "oracle-2026-12-01-a.jsonl", rows)
    write_rows(tmp_path, "oracle-2026-12-01-a-later.jsonl", [again])
    assert [path.name for path in latest("oracle", "jsonl", tmp_path)] == [
        "oracle-2026-12-01-a.jsonl"
    ]
    lines = list(search.oracle(tmp_path / "oracle-2026-12-01-a.jsonl"))
    again_line = (
        "Measured again at commit later (`benchmarks/results/oracle-2026-12-01-a-later.jsonl`):"
    )
    at = lines.index(again_line)
    assert any(line.startswith("| lstm | 0.800") for line in lines[:at])
    assert any("(worst 0.800)" in line for line in lines[:at])
    assert lines[-1].startswith("| lstm | 1.050")


def test_every_machine_has_a_row_and_a_new_one_adds_its_own(tmp_path: Path) -> None:
    write_rows(tmp_path, "oracle-2026-12-01-a.jsonl", [row(search.SHOWN)])
    write_rows(tmp_path, "peers-2026-12-01-b.jsonl", [{"family": "new-cpu", "date": "2026-12-01"}])
    lines = list(search.machines(tmp_path))[2:]
    assert lines[0].startswith("| Zen 4 | 2026-12-01 | mixed_bfloat16, batch 64, fused_optimizer |")
    assert lines[0].endswith("| 1.50 (1.49-1.51) | trains like float32 |")
    assert lines[1] == "| new-cpu" + " | not measured" * 5 + " |"
    write_rows(tmp_path, "oracle-2026-12-01-b.jsonl", [row(search.SHOWN, "new-cpu")])
    assert len(list(search.machines(tmp_path))) == 4
    assert "| new-cpu | 2026-12-01 |" in "\n".join(search.machines(tmp_path))


def test_a_newer_run_of_few_tasks_replaces_those_rows_alone(tmp_path: Path) -> None:
    write_rows(tmp_path, "oracle-2026-11-01-a.jsonl", [row(best=0.9), row("lstm", best=0.8)])
    write_rows(tmp_path, "oracle-2026-12-01-a.jsonl", [row(best=0.99)])
    found = [(r["task"], r["chosen_over_best"]["ratio"]) for r in search.best_and_worst(tmp_path)]
    assert found == [("lstm", 0.8), ("mlp", 0.99)]
    files = [path.name for path in latest("oracle", "jsonl", tmp_path)]
    assert files == ["oracle-2026-12-01-a.jsonl", "oracle-2026-11-01-a.jsonl"]
    write_rows(tmp_path, "oracle-2026-12-02-a.jsonl", [row(), row("lstm")])
    assert [path.name for path in latest("oracle", "jsonl", tmp_path)] == [
        "oracle-2026-12-02-a.jsonl"
    ]
