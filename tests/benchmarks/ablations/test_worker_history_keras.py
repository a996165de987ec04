"""The benchmark of a recipe after others in one worker runs, and says what it measured on what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkout import child_environment


@pytest.mark.release  # it starts four workers of its own, for half a minute
def test_the_benchmark_of_a_recipe_after_others_writes_a_row(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    words = ["--quick", "--tasks", "keras_mlp", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ablations.worker_history", *words],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = map(json.loads, output.read_text().splitlines())
    assert {"date", "commit", "device", "tensorflow", "keras"} <= row.keys()
    assert row["ratios"] == pytest.approx([row["after"][0] / row["alone"][0]])
    assert row["after_over_alone"]["ratio"] == pytest.approx(row["ratios"][0])
    assert len(row["others"]) == 3
