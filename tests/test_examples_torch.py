"""Every PyTorch task file builds, gives the batches it is asked for, and trains in plain torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autoprec import Policy, Recipe
from tests.code_blocks import block

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "torch"
TASKS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.name.startswith("train_"))


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> ModuleType:
    spec = importlib.util.spec_from_file_location(request.param, FOLDER / f"{request.param}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module


@pytest.mark.parametrize("batch_size", [8, 24])
def test_data_has_the_batch_asked_for(task: ModuleType, batch_size: int) -> None:
    for inputs, targets in islice(task.build_data(batch_size), 3):
        assert len(inputs) == len(targets) == batch_size
        assert inputs.dtype in (torch.float32, torch.int64)


def test_data_is_the_same_under_the_same_seed(task: ModuleType) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append(list(islice(task.build_data(8), 3)))
    for (inputs, targets), (inputs_again, targets_again) in zip(*runs, strict=True):
        assert torch.equal(inputs, inputs_again)
        assert torch.equal(targets, targets_again)


def test_the_loss_of_one_batch_falls_in_plain_float32(task: ModuleType) -> None:
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    inputs, targets = next(iter(task.build_data(16)))
    losses = []
    for _ in range(8):
        loss = task.loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_evaluate_gives_a_share_and_leaves_the_model_training(task: ModuleType) -> None:
    model = task.build_model()
    if hasattr(task, "evaluate"):
        assert 0.0 <= task.evaluate(model) <= 1.0
    assert model.training


def run_script(name: str, *arguments: str | Path, expect: int = 0) -> str:
    """Run a training script as a user does; return what it printed."""
    child = subprocess.run(
        [sys.executable, FOLDER / name, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == expect, child.stderr
    return child.stdout if expect == 0 else child.stderr


WriteProfile = Callable[[Recipe, str], Path]


LOOPS = {"in full": block("docs/apply-pytorch.md", 1), "in short": block("README.md", 2)}


@pytest.mark.parametrize("form", LOOPS)
def test_the_documented_loops_train_the_documented_task(
    write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4, accumulation_steps=3)
    monkeypatch.chdir(write_profile(recipe, "torch").parent)
    names: dict[str, Any] = {}
    exec(block("docs/task-file.md", 0), names)
    model = names["build_model"]()
    before = model[0].weight.detach().clone()
    optimizer = names["build_optimizer"](model)
    names |= {"model": model, "optimizer": optimizer}
    names["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    names["loader"] = list(islice(names["build_data"](4), 7))
    exec(LOOPS[form], names)
    assert names["loss"].dtype is torch.float32
    assert names["precision"].steps == 3  # the last by flush()
    assert names["scheduler"].last_epoch == (2 if form == "in full" else 3)
    assert not torch.equal(model[0].weight, before)


def test_train_digits_prints_both_trainings(write_profile: WriteProfile) -> None:
    profile = write_profile(Recipe(batch_size=64, accumulation_steps=2), "torch")
    printed = run_script("train_digits.py", "--profile", profile, "--steps", "4")
    assert "recipe: float32 at batch 64" in printed
    assert [line.split()[0] for line in printed.splitlines() if " ms" in line] == [
        "float32",
        "tuned",
    ]
    assert "median over 4 pairs" in printed


def test_train_digits_says_what_to_do_without_a_profile(tmp_path: Path) -> None:
    said = run_script("train_digits.py", "--profile", tmp_path / "absent.yaml", expect=2)
    assert "autoprec tune examples/torch/digits_conv.py" in said


@pytest.mark.slow
@pytest.mark.release
def test_train_mobilenet_resumes_where_it_stopped(
    write_profile: WriteProfile, tmp_path: Path
) -> None:
    profile = write_profile(Recipe(policy=Policy.FLOAT32, batch_size=240), "torch")

    def train(epochs: int, checkpoint: str) -> list[str]:
        printed = run_script(
            "train_mobilenet.py",
            *("--profile", profile, "--epochs", str(epochs)),
            *("--checkpoint", tmp_path / checkpoint),
        )
        return [line for line in printed.splitlines() if line.startswith("epoch")]

    whole = train(2, "whole.pt")
    assert len(whole) == 2
    assert train(1, "parts.pt") + train(2, "parts.pt") == whole
