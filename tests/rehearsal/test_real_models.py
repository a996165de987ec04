"""The measuring of models of real size on a pretended GPU: what needs one there is called right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rehearsal import Rehearsal

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.release]


def test_every_way_of_a_convolutional_model_runs_on_a_gpu(tmp_path: Path) -> None:
    machine = Rehearsal(tmp_path, environment={"REAL_TASK_SIZE": "tiny"})
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu.pieces", "real-resnet50", str(rows)]
    done = machine.run([*command, "--device", "cuda", "--quick"], seconds=280)
    assert done.returncode == 0, done.stderr
    first, *visits = [json.loads(line) for line in rows.read_text().splitlines()]
    assert set(first["peaks"]) == {"float32", "tf32", "bfloat16", "float16", "float8"}
    assert [row for row in visits if "failed" in row] == []
    dtypes = {row["way"]: row["dtype"] for row in visits}
    assert len(visits) == 2 * len(dtypes) == 16
    assert (dtypes["float32"], dtypes["float32 IEEE"], dtypes["tf32"]) == (
        "tf32",
        "float32",
        "tf32",
    )
    assert all(row["peak_memory_bytes"] > 0 for row in visits)
