"""A model, its optimizer, a loader and a step are the task that a task file would make of them."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autoprec.backends.protocol import Task
from autoprec.backends.shared import worker_process
from autoprec.backends.torch.backend import TorchBackend
from autoprec.backends.torch.capture import from_parts
from autoprec.backends.torch.train.task_runner import batches
from autoprec.errors import DataError, TaskError, UsageError
from tests.backends.torch.capture.captured import (
    BATCHES,
    data,
    first_loss,
    net,
    optimizer_of,
    step,
    weights,
    written_task,
)

pytestmark = pytest.mark.torch


def parts(**changes: Any) -> Task:
    model = changes.pop("model", None) or net()
    given = {
        "optimizer": optimizer_of(model) if isinstance(model, nn.Module) else None,
        "loader": DataLoader(data(), batch_size=32, shuffle=True),
        "step": step,
        **changes,
    }
    return from_parts(model, **given, name="train.py:build")


@pytest.mark.parametrize("batch_size", BATCHES)
def test_the_first_loss_is_that_of_the_task_file(batch_size: int) -> None:
    assert first_loss(parts(), batch_size) == first_loss(written_task(), batch_size)


def test_every_model_begins_with_the_weights_that_were_given() -> None:
    model = net()
    task = parts(model=model)
    before = weights(model)
    trained = task.build_model()
    assert task.build_optimizer is not None
    optimizer = task.build_optimizer(trained)
    batch = next(iter(task.build_data(16)))
    step(trained, batch).backward()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(trained), strict=True))
    for again in (model, task.build_model()):
        assert all(torch.equal(a, b) for a, b in zip(before, weights(again), strict=True))
    assert task.build_model() is not task.build_model()


def test_the_batch_and_the_clip_are_the_tasks() -> None:
    task = parts(clip_grad_norm=0.5)
    assert (task.batch_size, task.clip_grad_norm, task.fixed_batch) == (32, 0.5, "")


def test_it_is_described_as_a_task_of_its_own_batch() -> None:
    facts = TorchBackend().describe(
        parts(), device="cpu", seed=0, batch_size=32, report=lambda *_: None
    )
    assert (facts.batch_size, facts.samples, facts.fixed_batch) == (32, 32, False)


def test_a_batch_that_the_loader_fixes_is_not_split() -> None:
    loader = [[torch.randn(8, length), torch.zeros(8).long()] for length in (6, 7, 6, 6)]

    class AnyWidth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(1, 3)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.last(features.mean(1, keepdim=True))

    task = parts(model=AnyWidth(), loader=loader)
    facts = TorchBackend().describe(
        task, device="cpu", seed=0, batch_size=8, report=lambda *_: None
    )
    assert not facts.splittable
    assert facts.fixed_batch
    assert "pads each batch by itself" in facts.split_reason
    assert task.batch_size == 8


def test_what_the_data_raise_is_told_without_our_files() -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, place: int) -> Any:
            raise KeyError("no such sample")

    task = parts(loader=DataLoader(Broken(), batch_size=8))
    with pytest.raises(DataError, match=r"KeyError: 'no such sample'$"):
        next(batches(task, 8, 0))


def test_a_loader_may_be_a_function_of_the_batch_size() -> None:
    task = parts(loader=lambda size: DataLoader(data(), batch_size=size, shuffle=True))
    assert task.batch_size is None
    assert first_loss(task, 16) == first_loss(written_task(), 16)


def wrong() -> dict[str, tuple[dict[str, Any], str]]:
    model = net()
    other = optimizer_of(net())
    return {
        "no module": ({"model": 3}, "the model is a int, expected an nn.Module"),
        "step of one argument": ({"step": lambda batch: 0}, "cannot be called as step(model, bat"),
        "no step": ({"step": None}, "the step is a NoneType, expected step(model, batch) -> loss"),
        "step with the model itself": (
            {"model": model, "step": lambda _, batch: model(batch[0]).sum()},
            "uses the variable 'model', which is the model itself",
        ),
        "another model's optimizer": ({"optimizer": other}, "are none of the Net's"),
        "LBFGS": ({"model": model, "optimizer": torch.optim.LBFGS(model.parameters())}, "closure"),
        "no optimizer": ({"optimizer": 1e-3}, "the optimizer is a float, expected a torch.optim"),
        "no loader": ({"loader": None}, "the loader is None, expected a DataLoader"),
    }


@pytest.mark.parametrize("case", list(wrong()))
def test_what_cannot_be_tuned_is_refused_with_the_way_out(case: str) -> None:
    changes, message = wrong()[case]
    with pytest.raises(UsageError) as caught:
        parts(**changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("train.py:build: ")


def test_a_model_that_cannot_be_copied_names_the_part_and_the_task_file() -> None:
    class Keeper:
        def __init__(self, module: nn.Module) -> None:
            self.lock, self.weights = threading.Lock(), list(module.parameters())

    model = net()
    model.norm.kept = Keeper(model.norm)
    task = parts(model=model, loader=DataLoader(data(), batch_size=8))
    with pytest.raises(TaskError) as caught:
        task.build_model()
    assert "norm.kept is a Keeper" in str(caught.value)
    assert "write a task file" in str(caught.value)


def test_copies_share_what_cannot_be_copied_and_holds_no_weights() -> None:
    model = net()
    model.norm.lock, model.own = threading.Lock(), {"lock": threading.Lock()}
    model.called = model.forward  # leads back to all of it
    task = parts(model=model, loader=DataLoader(data(), batch_size=8))
    one, other = task.build_model(), task.build_model()
    assert one.norm.lock is other.norm.lock is model.norm.lock
    assert one.called.__self__ is one
    assert one.first.weight is not other.first.weight
    assert any("norm.lock (lock), own (dict)" in each for each in worker_process.notes())


def test_a_weight_that_is_computed_before_each_step_is_no_obstacle() -> None:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.first)
    task = parts(model=model)
    assert first_loss(task, 16) == pytest.approx(first_loss(written_task(), 16), rel=1e-6)
    copied = task.build_model()
    step(copied, next(iter(task.build_data(16)))).backward()
    assert copied.first.weight_g.grad is not None
    assert model.first.weight_g.grad is None
