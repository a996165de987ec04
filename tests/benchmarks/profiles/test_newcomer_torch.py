"""The command of docs/first-hour.md runs, trains both sides alike, and tells what trains worse."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autoprec import Recipe, apply_profile
from benchmarks.checkout import RESULTS
from benchmarks.profiles import newcomer

SCRIPTS = ("digits_net", "digits_conv", "train_before", "train_after", "train_digits")


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_are_where_it_looks(name: str) -> None:
    assert newcomer.load(name).__file__ == str(newcomer.FOLDER / f"{name}.py")


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.usefixtures("unmeasured")
def test_the_command_tunes_and_trains_on_the_same_number_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tuning is cut short."""
    quick = partial(newcomer.tune, rounds=1, proof_steps=30, extras=False)
    monkeypatch.setattr(newcomer, "tune", quick)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # locks apart from other tests' tunings
    output = tmp_path / "newcomer.json"
    words = ["--tasks", "digits_net", "--seeds", "1", "--epochs", "3", "--trials", "1"]
    newcomer.main([*words, "--forced", "--output", str(output)])
    found = json.loads(output.read_text())
    assert {"date", "commit", "device", "family", "torch"} <= found.keys()
    before, after = found["rows"]
    assert [before["side"], after["side"]] == [newcomer.FLOAT32, newcomer.TUNED]
    for (run,) in (before["runs"], after["runs"]):
        assert (run["samples"], run["updates"]) == (3 * 1197, 3 * 19)
        assert run["accuracy"] > 0.85
    recipe = after["recipe"]
    assert recipe["batch_size"] * recipe.get("accumulation_steps", 1) == 64


def test_micro_batches_are_counted_as_the_updates_that_they_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = Recipe(policy="mixed_bfloat16", batch_size=16, accumulation_steps=4)  # type: ignore[arg-type]
    load = newcomer.load

    def with_recipe(name: str) -> Any:
        script: Any = load(name)
        script.apply_profile = lambda _, **named: apply_profile(recipe, **named)
        return script

    monkeypatch.setattr(newcomer, "load", with_recipe)
    (run,) = newcomer.trained("digits_net", Path("any.profile.yaml"), 1, 1)
    assert (run["samples"], run["updates"]) == (1197, 19)


def test_worse_is_a_mean_below_all_of_float32s_seeds() -> None:
    def row(side: str, *accuracies: float) -> dict[str, Any]:
        return {"task": "t", "side": side, "runs": [{"accuracy": a} for a in accuracies]}

    float32 = row(newcomer.FLOAT32, 0.97, 0.98)
    assert newcomer.worse([float32, row(newcomer.TUNED, 0.96, 0.99)]) == []
    assert newcomer.worse([float32, row(newcomer.TUNED, 0.96, 0.97)]) == [
        "t, tuned: 96.5% on average, float32 97.0% or more"
    ]


def test_nothing_trains_worse_in_the_newest_result() -> None:
    """As docs/first-hour.md says below its table."""
    newest = max(RESULTS.glob("newcomer-*.json"))
    found = json.loads(newest.read_text(encoding="utf-8"))
    assert newcomer.worse(found["rows"]) == []
    for row in found["rows"]:
        own = [each for each in found["rows"] if each["task"] == row["task"]]
        assert len({run["samples"] for each in own for run in each["runs"]}) == 1
