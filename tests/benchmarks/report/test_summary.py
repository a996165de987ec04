"""The README's results: a row for each device, what was not measured named; and the picture."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from autoprec.core.codec import to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from benchmarks.report.picture import picture
from benchmarks.report.summary import summary


def tuning(task: str, recipe: Recipe, overall: float, alone: float | None) -> dict[str, Any]:
    def ratio(value: float) -> dict[str, float]:
        return {"ratio": value, "low": value - 0.1, "high": value + 0.1}

    same = None if alone is None else ratio(alone)
    return {
        "task": task,
        "recipe": to_plain(recipe),
        "inconclusive": "",
        "claimed": ratio(overall),
        "claimed_same_batch": same,
        "applied": ratio(overall),
    }


BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=128)


def write(folder: Path, family: str, day: str, *rows: dict[str, Any]) -> None:
    found = {"family": family, "date": day, "device": "AMD EPYC", "rows": list(rows)}
    (folder / f"applied-{day}-{family}.json").write_text(json.dumps(found))


def cells(folder: Path) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in list(summary(folder))[2:]]


def test_a_row_for_each_device_says_what_was_not_measured(tmp_path: Path) -> None:
    write(tmp_path, "amd-zen5", "2026-12-01", tuning("encoder", BFLOAT16, 3.0, 2.0))
    write(tmp_path, "amd-zen4", "2026-12-01", tuning("encoder", BFLOAT16, 3.0, None))
    write(tmp_path, "amd-zen3", "2026-12-01", tuning("encoder", Recipe(), 1.5, None))
    (tmp_path / "growth-2026-12-01.json").write_text(json.dumps({"family": "intel-amx"}))
    rows = {row[0]: row[2:] for row in cells(tmp_path)}
    assert rows["Zen 5"][1:] == ["2.00x (1.90-2.10)", "3.00x (2.90-3.10)"]
    assert rows["Zen 4"][1:] == ["not measured", "3.00x (2.90-3.10)"]
    assert rows["Zen 3"][1] == "none: float32 is the fastest"
    assert rows["Xeon with AMX"] == ["not measured"] * 3


def test_a_batchs_gain_is_precisions_only_where_the_recipe_sets_nothing_else(
    tmp_path: Path,
) -> None:
    compiled = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=128, compile=True)
    write(tmp_path, "amd-zen5", "2026-12-01", tuning("encoder", compiled, 3.0, 2.0))
    assert cells(tmp_path)[0][3] == "not measured"


def test_a_gpu_is_shown_by_a_model_of_real_size(tmp_path: Path) -> None:
    """Nothing is claimed of it before that ran, whatever small tasks gained there."""
    row = {"piece": "tune-encoder", "device": "NVIDIA H100", "date": "2026-12-01", "commit": "c"}
    (tmp_path / "gpu_tune-encoder-2026-12-01-nvidia-h100.jsonl").write_text(json.dumps(row))
    (shown,) = (row for row in cells(tmp_path) if "H100" in row[0])
    assert shown[1:] == ["GPT-2 124M, 1024 tokens (PyTorch)", *["not measured yet"] * 3]


def test_the_newest_tuning_with_keras_is_the_last_row(tmp_path: Path) -> None:
    write(tmp_path, "amd-zen5", "2026-12-02", tuning("keras_conv", BFLOAT16, 3.0, 2.0))
    write(tmp_path, "amd-zen4", "2026-12-01", tuning("keras_conv", BFLOAT16, 4.0, 2.0))
    last = cells(tmp_path)[-1]
    assert last[:2] == ["Zen 5", "convolutions (Keras)"]
    assert last[4] == "3.00x (2.90-3.10)"


def test_without_a_tuning_to_draw_the_report_ends(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no tuning of encoder on an NVIDIA H200"):
        picture(tmp_path)


def test_the_picture_is_an_image_by_itself() -> None:
    root = ET.fromstring(picture())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    style = next(each.text or "" for each in root if each.tag.endswith("style"))
    classes = {name for each in root.iter() for name in each.get("class", "").split()}
    assert {name for name in classes if not re.search(rf"\.{name}\b", style)} == set()
    assert "body" not in style
