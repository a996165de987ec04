"""Which tasks a zoo's gate holds: of each folder the cheapest, and no verdict has a say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.numerics import gate
from benchmarks.numerics.zoo import ZOO_KERAS

ROWS = [
    {"zoo": zoo, "task": task, "seconds": seconds}
    for zoo, costs in {
        "zoo": {"a": 3.0, "b": 1.0, "c": 2.0, "d": 9.0},
        "zoo/field": {"e": 8.0},
    }.items()
    for task, seconds in costs.items()
]


def test_the_cheapest_tasks_of_each_folder_are_chosen() -> None:
    chosen = gate.chosen(ROWS, {"zoo": 0.5, "zoo/field": 0.34})
    assert chosen == {"zoo": {"b": 1.0, "c": 2.0}, "zoo/field": {"e": 8.0}}


def test_a_share_is_rounded_up() -> None:
    assert list(gate.chosen(ROWS, {"zoo": 0.51})["zoo"]) == ["b", "c", "a"]


def test_what_is_chosen_is_written_to_the_first_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "zoo_keras"
    (folder / "field").mkdir(parents=True)
    for place in (folder, folder / "field"):
        source = ZOO_KERAS / place.relative_to(folder)
        (place / "truth.json").write_text((source / "truth.json").read_text())
        for name in ("running_moments", "distances"):
            if (source / f"{name}.py").exists():
                (place / f"{name}.py").write_text((source / f"{name}.py").read_text())

    def judged(jobs, processes, judge):
        assert judge is gate.timed
        for job in jobs:
            yield {"rows": [{"zoo": job.zoo, "task": job.path.stem, "seconds": 1.0}]}

    monkeypatch.setattr(gate, "judged", judged)
    given = [f"{folder}=0.5", f"{folder / 'field'}=1", "--seed", "7"]
    monkeypatch.setattr(sys, "argv", ["gate", *given])
    assert gate.main() == 0
    found = json.loads((folder / "gate.json").read_text())
    assert found["seconds"] == {
        "zoo_keras": {"distances": 1.0},
        "zoo_keras/field": {"running_moments": 1.0},
    }
    assert found["measured"]["seed"] == 7
    assert found["measured"]["tasks"] == {"zoo_keras": 1, "zoo_keras/field": 1}
