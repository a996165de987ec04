"""The rows of models of real size: their order, what goes on where it stopped, and their checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec.backends.shared.matmul_timing import ProductBudget, time_product
from autoprec.backends.torch.apply.float8_linear import float8_layers
from autoprec.backends.torch.apply.process_settings import process_settings_restored
from autoprec.core.dtypes import DType, Policy
from benchmarks.checkout import ROOT
from benchmarks.gpu import evidence, piece_files, real_rows
from benchmarks.gpu.real_models import MODELS, ways
from benchmarks.gpu.real_steps import Seen
from tests.benchmarks.gpu.real_tasks import NAMES, forgotten, loaded

pytestmark = pytest.mark.torch

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REAL_TASK_SIZE", "tiny")


def dry_rows(name: str, earlier: list[Row], has_tf32: bool = False) -> tuple[list[Row], str]:
    """The rows of a dry run on the CPU, and why it failed."""
    rows, running = [], real_rows.real_rows(MODELS[name], "cpu", True, has_tf32, earlier)
    with forgotten():
        while True:
            try:
                rows.append(next(running))
            except StopIteration as stopped:
                return rows, stopped.value


def names(rows: list[Row]) -> list[tuple[str, int]]:
    return [(row["way"], row["visit"]) for row in rows if "way" in row]


def test_every_way_is_visited_twice_in_mirrored_order_and_what_is_there_is_kept() -> None:
    rows, failed = dry_rows("mlp8192", [])
    assert failed == ""
    found = ["float32", "float32 IEEE", "mixed_bfloat16", "mixed_float16"]
    found += ["mixed_bfloat16 compiled", "float8 compiled"]
    assert names(rows) == [*((w, 0) for w in found), *((w, 1) for w in reversed(found))]
    for row in rows[1:]:
        assert row["step_seconds"] > 0
        assert row["tflops"] == pytest.approx(row["samples_per_second"] * 229_120 / 1e12, rel=0.01)
        assert row["peak_share"] > 0
        assert row["peak_memory_bytes"] > 0
        assert "tokens_per_second" not in row
        assert json.loads(json.dumps(row)).keys() == row.keys()
    assert set(rows[0]["peaks"]) == {"float32", "bfloat16", "float16"}

    rest, failed = dry_rows("mlp8192", [rows[0], *rows[2:8]])
    assert failed == ""
    assert names(rest) == [("float32", 0), *names(rows[8:])]
    assert dry_rows("mlp8192", rows) == ([], "")


def test_a_way_that_does_not_run_says_why_and_stops_no_other(monkeypatch: Any) -> None:
    visit, asked = real_rows.visit, []

    def partly(task: Any, way: Any, *rest: Any) -> Seen:
        asked.append(way.name)
        if way.recipe.policy is Policy.MIXED_BFLOAT16:
            raise RuntimeError("out of memory\nof the device")
        return visit(task, way, *rest)

    monkeypatch.setattr(real_rows, "visit", partly)
    rows, failed = dry_rows("llama_blocks", [])
    assert failed == ""
    assert len(asked) == 8
    said = [row.get("failed") for row in rows if "way" in row]
    why = "RuntimeError: out of memory"
    assert said == [None, None, why, None, None, why, None, None]
    assert all(row["tokens_per_second"] == 32 * row["samples_per_second"] for row in rows[1:3])

    def never(*given: Any) -> Seen:
        raise RuntimeError("no")

    monkeypatch.setattr(real_rows, "visit", never)
    assert dry_rows("llama_blocks", [])[1] == "no way of llama_blocks ran: RuntimeError: no"


def test_padding_is_measured_beside_a_rounded_vocabulary_and_both_compute_the_same() -> None:
    rows, _ = dry_rows("gpt2_rounded", [])
    first = {
        row["way"].removeprefix("mixed_bfloat16 "): row for row in rows if row.get("visit") == 0
    }
    assert list(first) == ["float32", "as it is", "padded", "rounded"]
    assert first["padded"]["padded"] == ["head"]
    assert "skipped" not in first["padded"]
    assert first["rounded"]["model"] == "gpt2_rounded"
    assert first["padded"]["losses"] == pytest.approx(first["as it is"]["losses"], rel=1e-3)


def test_the_float32s_differ_in_what_convolutions_compute_in(monkeypatch: Any) -> None:
    import torch

    given = {}

    def look(task: Any, way: Any, *rest: Any) -> Seen:
        given[way.name] = torch.backends.cudnn.allow_tf32
        raise RuntimeError("seen")

    with process_settings_restored():
        torch.backends.cudnn.allow_tf32 = True
        monkeypatch.setattr("benchmarks.gpu.real_steps._train", look)
        dry_rows("unet", [])
        assert torch.backends.cudnn.allow_tf32
    assert not given["float32 IEEE"]
    assert given["float32"]
    model = MODELS["unet"]
    dtypes = {way.name: way.multiplies_in(model) for way in ways(model, 2, has_tf32=True)}
    assert (dtypes["float32"], dtypes["float32 IEEE"]) == (DType.TF32, DType.FLOAT32)
    gpt2 = MODELS["gpt2"]
    assert ways(gpt2, 2, has_tf32=True)[0].multiplies_in(gpt2) is DType.FLOAT32


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if not model.rounded])
def test_float8_is_measured_where_the_model_has_layers_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REAL_TASK_SIZE")
    with loaded(MODELS[name].task) as task, torch.device("meta"):
        layers = float8_layers(task.build_model())
    assert bool(layers) == MODELS[name].float8
    found = {way.name: way for way in ways(MODELS[name], 8, has_tf32=True)}
    assert ("float8 compiled" in found) == bool(layers)
    for way in (found["float8 compiled"],) if layers else ():
        assert way.recipe.uses_float8
        assert way.multiplies_in(MODELS[name]) is DType.FLOAT8


def test_on_a_device_without_float8_nothing_is_called_so() -> None:
    rows: list[Row] = [{"peaks": {"bfloat16": 1.0}}]
    bench = real_rows.Bench(MODELS["mlp8192"], "cpu", False, rows)
    with forgotten():
        assert "float8 compiled" not in {w.name for w in real_rows.all_ways(bench, True)}
        rows[0]["peaks"]["float8"] = 2.0
        assert "float8 compiled" in {w.name for w in real_rows.all_ways(bench, True)}


def test_float8_products_are_timed_as_others_are() -> None:
    arithmetic = real_rows.Float8Arithmetic(torch.device("cpu"))
    product = time_product(arithmetic, DType.FLOAT8, ProductBudget(1e-9, 1e-9))
    assert product.failure == ""
    assert (product.gflops or 0) > 0


def test_every_task_has_a_piece_and_compiled_ways_come_last() -> None:
    tasks = {name for model in MODELS.values() for name in (model.task, model.rounded) if name}
    assert tasks == set(NAMES)
    assert {f"real-{name}" for name in MODELS} <= set(evidence.LIMIT_SECONDS)
    for model in MODELS.values():
        every = ways(model, 8, has_tf32=True)
        compiled = [way.recipe.compile for way in every]
        assert compiled == sorted(compiled)
        assert every[0].name == "float32"
        assert len({way.name for way in every}) == len(every)
    by_hand = [n for n, m in MODELS.items() if any(way.by_hand for way in ways(m, 8, True))]
    assert by_hand == ["gpt2", "resnet50"]


SEEN = Seen(
    step=1.0,
    steps=9,
    first_step=2.0,
    losses=(4.0, 2.0),
    peak_memory_bytes=1,
    clocks=(1000, 990),
    recompiled=False,
    loss_scale=None,
    changes={},
)


@pytest.mark.parametrize(
    ("changed", "share", "doubt"),
    [
        ({}, 0.9, None),
        ({}, 1.05, "1.05 of the measured peak"),
        ({"step": 1.1}, 0.9, r"\+10 % from visit 0"),
        ({"losses": (4.2, 2.0)}, 0.9, "first loss 4.2, 4 in float32"),
        ({"losses": (4.0, 1.9)}, 0.9, "last loss 1.9, 2 in float32"),
        ({"losses": (4.0, float("nan"))}, 0.9, "a loss is not finite"),
        ({"recompiled": True}, 0.9, "compiled again"),
        ({"clocks": (1000, 800)}, 0.9, "from 1000 to 800 MHz"),
        ({"clocks": None}, 0.9, None),
    ],
)
def test_a_check_that_fails_marks_its_row(
    changed: dict[str, Any], share: float, doubt: str | None
) -> None:
    import re

    model = MODELS["vit_b16"]
    plain, *_, way = ways(model, 8, has_tf32=False)
    told = {"by_hand": False, "visit": 0, "losses": (4.0, 2.0), "step_seconds": 1.0}
    rows = [
        {**told, "way": each.name, "recipe": {"policy": each.recipe.policy.value, "batch_size": 8}}
        for each in (plain, way)
    ]
    bench = real_rows.Bench(model, "cpu", True, rows)
    seen = replace(SEEN, **changed)
    said = list(real_rows.doubts(bench, way, 1, {"peak_share": share}, seen))
    if doubt is None:
        assert said == []
    else:
        (only,) = said
        assert re.search(doubt, only)


KILLED_PIECE = """
import json, os, sys, time
given = json.load(open(sys.argv[sys.argv.index("--given") + 1]))
with open(sys.argv[2], "a", buffering=1) as file:
    for number in range(len(given["earlier"]), 3):
        row = {**given["head"], "piece": "real-gpt2", "failed_piece": "not yet", "number": number}
        file.write(json.dumps(row) + "\\n")
        if "STOP" in os.environ:
            open(os.environ["STOP"], "w").close()
            time.sleep(60)
"""


def test_a_run_that_is_killed_leaves_its_rows_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """As on a machine that is taken away: nobody is asked to write anything then."""
    (tmp_path / "killed_piece.py").write_text(KILLED_PIECE)
    script = (
        "import sys\n"
        "from benchmarks.gpu import evidence\n"
        "evidence.PIECE_MODULE = 'killed_piece'\n"
        "sys.exit(evidence.main(sys.argv[1:]))"
    )
    output, stop = tmp_path / "output", tmp_path / "stop"
    words = ["--device", "cpu", "--quick", "--output", str(output), "--only", "real-gpt2"]
    command = [sys.executable, "-c", script, *words]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        command, env={**environment, "STOP": str(stop)}, start_new_session=True
    ) as child:
        while child.poll() is None and not stop.exists():
            time.sleep(0.05)
        child.kill()
    (left,) = output.glob("gpu_real-gpt2-*.jsonl")
    (row,) = piece_files.read_rows(left)
    assert (row["number"], row["no_evidence"]) == (0, "on the CPU, a dry run")
    assert row["failed_piece"] == "not yet"

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = list(piece_files.read_rows(left))
    assert [row["number"] for row in rows] == [0, 1, 2]
    assert not any("failed_piece" in row for row in rows)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "is known" in again.stdout


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_dry_run_measures_every_model(tmp_path: Path) -> None:
    pieces = [name for name in evidence.LIMIT_SECONDS if name.startswith("real-")]
    words = ["--device", "cpu", "--quick", "--output", str(tmp_path), "--only", *pieces]
    assert evidence.main(words) == 0
    for piece in pieces:
        (path,) = tmp_path.glob(f"gpu_{piece}-*.jsonl")
        rows = list(piece_files.read_rows(path))
        assert not any("failed" in row or "failed_piece" in row for row in rows)
        visits = [(row["way"], row["visit"]) for row in rows if "way" in row]
        assert len(visits) == len(set(visits)) >= 8
        assert {row["task"] for row in rows if "way" in row} == {MODELS[piece[5:]].task}
