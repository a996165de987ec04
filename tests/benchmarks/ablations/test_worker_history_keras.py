"""The benchmark of a recipe after others in one worker runs, and says what it measured on what."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.ablations import worker_history

#: In place of the benchmark's own task, which a CPU computes for seconds in float16.
TASK = """
import keras
import numpy as np

def build_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def build_data(batch_size):
    return np.ones((4 * batch_size, 8), "float32"), np.zeros(4 * batch_size, "int32")
"""


@pytest.mark.release
def test_the_benchmark_of_a_recipe_after_others_writes_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keras_mlp.py").write_text(TASK, encoding="utf-8")
    monkeypatch.setattr(worker_history, "TASKS", tmp_path)
    output = tmp_path / "rows.jsonl"
    words = ["--quick", "--tasks", "keras_mlp", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["worker_history", *words])
    worker_history.main()
    (row,) = map(json.loads, output.read_text().splitlines())
    assert {"date", "commit", "device", "tensorflow", "keras"} <= row.keys()
    assert row["ratios"] == pytest.approx([row["after"][0] / row["alone"][0]])
    assert row["after_over_alone"]["ratio"] == pytest.approx(row["ratios"][0])
    assert len(row["others"]) == 3
