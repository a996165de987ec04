"""The report's tables of tunings, from the newest rows of every machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_rows import BF16, ratio, row

from autoprec.core.codec import to_plain
from benchmarks.report import search
from benchmarks.report.latest import latest


def write_rows(folder: Path, name: str, rows: list[Any]) -> None:
    (folder / name).write_text("".join(f"{json.dumps(each)}\n" for each in rows))


def test_the_readme_has_the_worst_machine_before_the_best_and_counts_runs(tmp_path: Path) -> None:
    write_rows(tmp_path, "oracle-2026-12-01-a.jsonl", [row(best=1.01), row("lstm")])
    write_rows(tmp_path, "oracle-2026-12-02-b.jsonl", [row(family="amd-zen5", best=0.9)])
    write_rows(tmp_path, "oracle-2026-12-02-c.jsonl", [row(family="intel-amx", best=0.95)])
    write_rows(tmp_path, "oracle-2026-11-01-a.jsonl", [row(best=0.5)])  # an earlier run
    found = [(r["task"], r["family"]) for r in search.worst_and_best(tmp_path)]
    assert found == [("mlp", "amd-zen5"), ("lstm", "amd-zen4"), ("mlp", "amd-zen4")]
    assert search.runs_of("mlp", tmp_path) == 4
    text = "\n".join(search.oracle_summary(tmp_path))
    assert "| mlp | Zen 5, 2026-12-01 | 4 | measured twice | 0.900" in text


def once(**more: Any) -> Any:
    """A row of a grid whose best was measured once, without further knobs."""
    found = row(**more)
    return {k: v for k, v in found.items() if k not in ("fastest", "knobs_of_the_fastest")}


def test_a_row_whose_best_was_measured_once_says_so_and_is_no_best_beside_todays(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path, "oracle-2026-12-01-a.jsonl", [row(best=0.99), once(task="lstm", best=1.1)])
    write_rows(tmp_path, "oracle-2026-12-02-b.jsonl", [once(family="amd-zen5", best=1.05)])
    write_rows(tmp_path, "oracle-2026-12-02-c.jsonl", [once(family="intel-amx", best=0.9)])
    found = [(r["task"], r["family"]) for r in search.worst_and_best(tmp_path)]
    assert found == [("mlp", "intel-amx"), ("mlp", "amd-zen4"), ("lstm", "amd-zen4")]
    text = "\n".join(search.oracle_summary(tmp_path))
    assert "| mlp | Xeon with AMX, 2026-12-01 | 3 | measured once | 0.900" in text
    assert "| mlp | Zen 4, 2026-12-01 | 3 | measured twice | 0.990" in text
    assert "Where it was *measured once*, the grid has no further knobs" in text
    assert "Zen 5, commit abc1234, the best measured once." in text


def test_what_was_measured_again_stands_below_its_run_and_in_no_mean(tmp_path: Path) -> None:
    versions = {"torch": "2.13.0", "keras": "3.15.1", "tensorflow": "2.21.0"}
    again = {**row("lstm", best=1.05), "commit": "later", "grid_commit": "abc1234"}
    rows = [{**row(best=1.01), **versions, "grid_commit": "abc1234"}, row("lstm", best=0.8)]
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
    first, second = [line[:14] for line in lines[:at] if line.startswith(("| lstm", "| mlp"))]
    assert (first, second) == ("| lstm | 0.800", "| mlp | 1.010x"), "not the worst first"
    assert not any("The grid of" in line for line in lines[:at])
    assert any("(worst 0.800)" in line for line in lines[:at])
    assert lines[-3].startswith("| lstm | 1.050")
    assert lines[-1] == "The grid of lstm was measured at commit abc1234."


def test_every_machine_has_a_row_and_a_new_one_adds_its_own(tmp_path: Path) -> None:
    write_rows(tmp_path, "oracle-2026-12-01-a.jsonl", [row(search.SHOWN)])
    write_rows(tmp_path, "peers-2026-12-01-b.jsonl", [{"family": "new-cpu", "date": "2026-12-01"}])
    lines = list(search.machines(tmp_path))[2:]
    assert lines[0].startswith("| Zen 4 | 2026-12-01 | mixed_bfloat16, batch 64, fused_optimizer |")
    assert lines[0].endswith("| not measured | 1.50x (1.49-1.51) | trains like float32 |")
    assert lines[1] == "| new-cpu" + " | not measured" * 6 + " |"
    write_rows(tmp_path, "oracle-2026-12-01-b.jsonl", [row(search.SHOWN, "new-cpu")])
    assert len(list(search.machines(tmp_path))) == 4
    assert "| new-cpu | 2026-12-01 |" in "\n".join(search.machines(tmp_path))


def test_a_profile_in_fresh_processes_is_a_row_of_its_machine_the_newest_first(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path, "oracle-2026-12-01-a.jsonl", [row(search.SHOWN)])
    own = {"task": search.SHOWN, "recipe": to_plain(BF16), "inconclusive": ""}
    own |= {"claimed": ratio(1.26), "applied": ratio(1.14)}
    for family, day in (("amd-zen3", "2026-11-25"), ("amd-zen4", "2026-12-02")):
        found = {"date": day, "family": family, "rows": [own, {**own, "task": "another"}]}
        (tmp_path / f"applied-{day}.json").write_text(json.dumps(found))
    lines = list(search.machines(tmp_path))[2:]
    applied = "mixed_bfloat16, batch 64 | 1.26x (1.25-1.27) | 1.14x (1.13-1.15)"
    assert lines[0].startswith(f"| Zen 4 | 2026-12-02 | {applied} |")
    assert lines[1].startswith("| Zen 4 | 2026-12-01 |")
    assert lines[2].startswith(f"| Zen 3 | 2026-11-25 | {applied} |")
    assert len(lines) == 3


def test_all_runs_on_tasks_held_out_are_shown_and_counted(tmp_path: Path) -> None:
    own = {"task": "click_through", "framework": "torch", "recipe": to_plain(BF16), "seconds": 9}
    own |= {"verdict": "equal", "said": ratio(2), "applied_over_plain_at_its_batch": ratio(1)}
    for day, family, value in (
        ("2026-12-02", "amd-zen5", 1.5),
        ("2026-12-01", "amd-zen5", 0.5),
        ("2026-12-01", "amd-zen3", 0.7),
    ):
        rows = [{**own, "applied_over_plain": ratio(value)}]
        found = {"date": day, "commit": f"{value}", "family": family, "rows": rows}
        (tmp_path / f"holdout-{day}-{family}.json").write_text(json.dumps(found))
    text = "\n".join(search.holdout(tmp_path / "holdout-2026-12-02-amd-zen5.json"))
    assert "run twice on this machine" in text
    assert text.index("at worst 1.50x") < text.index("at worst 0.50x")
    assert "What changed between 0.5 and 1.5 is not told here." in text
    assert "amd-zen3" not in text


def test_a_newer_run_of_few_tasks_replaces_those_rows_alone(tmp_path: Path) -> None:
    write_rows(tmp_path, "oracle-2026-11-01-a.jsonl", [row(best=0.9), row("lstm", best=0.8)])
    write_rows(tmp_path, "oracle-2026-12-01-a.jsonl", [row(best=0.99)])
    found = [(r["task"], r["chosen_over_best"]["ratio"]) for r in search.worst_and_best(tmp_path)]
    assert found == [("lstm", 0.8), ("mlp", 0.99)]
    files = [path.name for path in latest("oracle", "jsonl", tmp_path)]
    assert files == ["oracle-2026-12-01-a.jsonl", "oracle-2026-11-01-a.jsonl"]
    write_rows(tmp_path, "oracle-2026-12-02-a.jsonl", [row(), row("lstm")])
    assert [path.name for path in latest("oracle", "jsonl", tmp_path)] == [
        "oracle-2026-12-02-a.jsonl"
    ]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("the step takes 543 ms, 195 ms of it arithmetic at peak", "the step takes 543 ms"),
        ("141 ms of arithmetic in a step of 219 ms", "the step takes 219 ms"),
        ("the step is overhead-bound: 0.82 ms of arithmetic in 9.7 ms", "the step takes 9.7 ms"),
    ],
)
def test_what_rests_on_operations_counted_twice_is_not_shown(said: str, shown: str) -> None:
    reason = f"mixed_bfloat16 is 2x float32 (1.9-2.1, 6 rounds) and equal; {said}"
    assert search.why(reason, "2026-11-27") == f"equal; {shown}"
    assert search.why(reason, search.COUNTED_ONCE_SINCE) == f"equal; {said}"


def test_no_table_shows_what_rests_on_operations_counted_twice() -> None:
    shown = [row for rows in search.tuned().values() for row in rows]
    old = [row for row in shown if row["date"] < search.COUNTED_ONCE_SINCE]
    assert any("of arithmetic" in row["reason"] for row in old), "recorded results changed"
    assert not [cell for row in old for cell in search.cells_of(row) if "arithmetic" in cell]
