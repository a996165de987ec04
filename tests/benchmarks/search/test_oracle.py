"""The oracle keeps what it has tuned until it is compared, and finishes it later."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_rows import BF16, row

from autoprec.tuning.race.sessions import FinalistFailed
from autoprec.workers.failures import FailureKind, WorkerFailure
from benchmarks.search import oracle

FAILED = FinalistFailed(BF16, WorkerFailure(FailureKind.OUT_OF_MEMORY, "out of memory"))
RATIOS = [name for name in row() if "_over_" in name]


class Measurements:
    """Stands in for what takes long: tunes every task, and compares all but some."""

    def __init__(self) -> None:
        self.tuned: list[str] = []
        self.not_compared: set[str] = set()

    def tune_task(self, name: str, head: Any, arguments: Any) -> Any:
        self.tuned.append(name)
        return {name: value for name, value in row(name).items() if name not in RATIOS}

    def compare(self, tuned: Any, arguments: Any) -> Any:
        if tuned["task"] in self.not_compared:
            raise FAILED
        return {**tuned, **{name: row()[name] for name in RATIOS}}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measurements:
    found = Measurements()
    monkeypatch.setattr(oracle, "tune_task", found.tune_task)
    monkeypatch.setattr(oracle, "compare", found.compare)
    head = {"date": "2026-12-01", "commit": "abc1234", "family": "amd-zen4"}
    monkeypatch.setattr(oracle, "machine", lambda: head)
    return found


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["oracle", *words])
    oracle.main()


def tasks_in(path: Path) -> list[str]:
    return [json.loads(line)["task"] for line in path.read_text().splitlines()]


def test_what_was_not_compared_waits_beside_the_results_and_is_finished_without_tuning(
    measured: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, waiting = tmp_path / "oracle.jsonl", tmp_path / "unfinished-oracle.jsonl"
    measured.not_compared = {"gpt"}
    with pytest.raises(SystemExit, match=f"not compared: gpt; --compare-again {waiting}"):
        run(monkeypatch, "--tasks", "gpt", "mlp", "--output", str(output))
    assert (tasks_in(output), tasks_in(waiting)) == (["mlp"], ["gpt"])

    measured.not_compared = set()
    words = ("--tasks", "gpt", "--output", str(output), "--compare-again", str(waiting))
    run(monkeypatch, *words)
    assert tasks_in(output) == ["mlp", "gpt"]
    assert not waiting.exists()
    assert measured.tuned == ["gpt", "mlp"]


def test_an_interrupted_comparison_loses_no_tuning(
    measured: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(tuned: Any, arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(oracle, "compare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, "--tasks", "mlp", "--output", str(tmp_path / "oracle.jsonl"))
    assert tasks_in(tmp_path / "unfinished-oracle.jsonl") == ["mlp"]


def test_results_of_this_commit_stay_and_those_of_another_do_not(
    measured: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "oracle.jsonl"
    rows = [row("lstm"), {**row("tiny"), "commit": "0000000"}]
    output.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    run(monkeypatch, "--tasks", "mlp", "--output", str(output))
    assert tasks_in(output) == ["lstm", "mlp"]


def test_a_task_that_a_result_lacks_is_named_before_anything_is_measured(
    measured: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text(f"{json.dumps(row('lstm'))}\n")
    with pytest.raises(SystemExit, match="has no result of gpt"):
        run(monkeypatch, "--tasks", "gpt", "--compare-again", str(source))
    assert measured.tuned == []


def test_failures_are_put_up_with_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    retries = oracle.Retries(1)
    retries(FAILED)
    said = "mixed_bfloat16, batch 64 failed: out of memory"
    assert said in capsys.readouterr().out
    with pytest.raises(FinalistFailed):
        retries(FAILED)
    assert oracle.notes({}, 300.0, [said]) == {
        "note": f"in the last alternation {said}; it was measured again"
    }
    assert oracle.notes({}, 300.0, []) == {}
    once_more = "the last alternation was measured once more, for up to 300 s"
    assert oracle.notes(row(), 300.0, []) == {"note": once_more}
