"""Every PyTorch task file builds, gives the batches it is asked for, and trains in plain torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch

from autoprec import Policy, Recipe
from tests.fork_server import ForkServer

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


RunScript = Callable[..., str]
WriteProfile = Callable[[Recipe, str], Path]


@pytest.fixture
def run_script(forked: ForkServer) -> RunScript:
    """Return a function that runs a training script as a user does; it returns what was printed."""

    def run(name: str, *arguments: str | Path, expect: int = 0) -> str:
        child = forked.run(FOLDER / name, *arguments)
        assert child.returncode == expect, child.stderr
        return child.stdout if expect == 0 else child.stderr

    return run


def test_train_digits_prints_both_trainings(
    run_script: RunScript, write_profile: WriteProfile
) -> None:
    profile = write_profile(Recipe(batch_size=64, accumulation_steps=2), "torch")
    printed = run_script("train_digits.py", "--profile", profile, "--steps", "4")
    assert "recipe: float32 at batch 64" in printed
    assert [line.split()[0] for line in printed.splitlines() if " ms" in line] == [
        "float32",
        "tuned",
    ]
    assert "median over 4 pairs" in printed


def test_train_digits_says_what_to_do_without_a_profile(
    run_script: RunScript, tmp_path: Path
) -> None:
    said = run_script("train_digits.py", "--profile", tmp_path / "absent.yaml", expect=2)
    assert "autoprec tune examples/torch/digits_conv.py" in said


@pytest.mark.slow
@pytest.mark.release
def test_train_mobilenet_resumes_where_it_stopped(
    run_script: RunScript, write_profile: WriteProfile, tmp_path: Path
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
