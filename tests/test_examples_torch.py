"""Every PyTorch task file builds, gives the batches it is asked for, and trains in plain torch."""

from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "examples" / "torch"
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
