"""What a disturbed tuning may lose, and that losing more fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.search import regret


@pytest.mark.parametrize(("low", "code"), [(1.0, 0), (0.9, 0), (0.89, 1)])
def test_the_gate_is_the_lower_end(
    low: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(task: str, seeds: int, rounds: int) -> list[dict[str, Any]]:
        ratio = {"ratio": 1.0, "low": low, "high": 1.1, "rounds": rounds}
        seconds = {"busy_seconds": 1.0, "tuning_seconds": 2.0}
        rows = range(seeds)
        return [{"task": task, "seed": s, **seconds, "disturbed_over_idle": ratio} for s in rows]

    monkeypatch.setattr(regret, "compare", compare)
    output = tmp_path / "regret.json"
    assert regret.main(["--tasks", "mlp", "--output", str(output)]) == code
    assert len(json.loads(output.read_text())["rows"]) == 3


def test_the_bound_is_stated() -> None:
    assert pytest.approx(0.9) == regret.BOUND
    assert "below 0.9" in (regret.__doc__ or "").replace("\n", " ")
