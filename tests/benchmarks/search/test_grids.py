"""Which points an exhaustive grid has, and whose recorded grid counts."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from benchmark_rows import SPACE, outcome

from autoprec.tuning.job import TuningJob
from benchmarks.search import grids


def test_further_knobs_are_measured_at_the_fastest_only() -> None:
    first = grids.points_of(SPACE, whole=False)
    assert len(first) == 8
    assert grids.further_knobs(SPACE) == ("fused_optimizer", "implicit_bfloat16")
    assert not any(p["fused_optimizer"] or p["implicit_bfloat16"] for p in first)
    assert len(grids.points_of(SPACE, whole=True)) == 32
    grid = grids.Grid(tuple(outcome(p, 1.0 + i) for i, p in enumerate(first)))
    fastest = grid.fastest(2)
    assert [o.point for o in fastest] == [first[-1], first[-2]]
    more = grids.refined(SPACE, [o.point for o in fastest])
    assert len(more) == 8
    assert first[-1] in more


def test_a_grid_that_was_resumed_has_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "_apart", lambda job, space, point, budget: outcome(point, 1.0))
    job = cast(TuningJob, None)
    grid = grids.measure_grid(job, SPACE, 5.0, [], lambda outcomes: None)
    assert grid.seconds is not None
    resumed = grids.measure_grid(job, SPACE, 5.0, grid.outcomes[:1], lambda outcomes: None)
    assert len(resumed.outcomes) == len(grid.outcomes)
    assert resumed.seconds is None


def test_a_grid_of_another_commit_counts_only_where_it_is_asked_for(tmp_path: Path) -> None:
    head = {"date": "2026-01-01", "commit": "abc1234", "family": "amd-zen4", "torch": "2.13"}
    path = tmp_path / "amd-zen4" / "mlp.json"
    point = grids.points_of(SPACE, whole=False)[0]
    grids.writer(path, head, grids.further_knobs(SPACE))([outcome(point, 5.0)])
    assert "fused_optimizer" not in path.read_text()
    assert [o.point for o in grids.read_curves(path, SPACE, head)] == [point]
    assert grids.read_curves(path, SPACE, {**head, "date": "2026-02-02"})
    other = {**head, "commit": "def5678"}
    assert grids.read_curves(path, SPACE, other) == []
    assert grids.read_curves(path, SPACE, other, any_commit=True)
    assert grids.read_curves(path, SPACE, {**head, "torch": "2.14"}, any_commit=True) == []
    assert grids.commit_of(path) == "abc1234"
    dirty = {**head, "commit": "abc1234-dirty"}
    grids.writer(path, dirty)([outcome(point, 5.0)])
    assert grids.read_curves(path, SPACE, dirty) == []
