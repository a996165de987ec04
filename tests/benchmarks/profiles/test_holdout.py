"""The hold-out: six tasks that are nowhere else, and a failure among them is a row."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.checkout import BENCHMARKS, HOLDOUT
from benchmarks.profiles import holdout
from benchmarks.report import search


def test_the_hold_out_is_four_torch_tasks_and_two_of_keras_that_are_nowhere_else() -> None:
    names = [path.stem for path in HOLDOUT.glob("*.py")]
    assert len(names) == 6
    assert sum(name.startswith("keras") for name in names) == 2
    here = {path.stem for path in (BENCHMARKS / "tasks").glob("*.py")}
    zoo = {path.stem for path in (BENCHMARKS.parent / "tests").rglob("*.py")}
    assert set(names).isdisjoint(here | zoo)
    said = (BENCHMARKS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "no change of the tuner may be developed on" in said


def test_rounds_of_one_process_count_once() -> None:
    """Processes that differ by a tenth each, and agree within: three ratios, not six."""
    rates = [1.0, 1.0, 1.1, 1.1, 1.21, 1.21]
    assert holdout.by_process(rates, 2) == pytest.approx([1.0, 1.1, 1.21])
    assert holdout.by_process([1.0, 4.0, 9.0], 3) == pytest.approx([36 ** (1 / 3)])
    assert holdout.by_process(rates, 1) == pytest.approx(rates)


def test_a_task_of_the_hold_out_that_fails_is_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    def fail(*_: object) -> None:
        raise RuntimeError("autoprec tune ended with 3: no feasible recipe")

    monkeypatch.setattr(holdout, "tuned", fail)
    found = holdout.measure(HOLDOUT / "click_through.py", SimpleNamespace(tune=[]))
    assert found["failed"].endswith("no feasible recipe")
    path = tmp_path / "holdout.json"
    path.write_text(json.dumps({"date": "2026-12-01", "family": "amd-zen4", "rows": [found]}))
    lines = list(search.holdout(path))
    assert any(
        line.startswith("| click_through | torch | failed: autoprec tune ended with 3")
        for line in lines
    )
    assert lines[-1].startswith("Not run to the end here: code_completion, keras_leaf_disease,")
