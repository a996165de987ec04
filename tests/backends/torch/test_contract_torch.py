"""The backend contract for PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from contract import BackendContract, Subject
from torch import nn

from autoprec.backends import registry
from autoprec.backends.protocol import Task


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(16):
        inputs = torch.randn(batch_size, 6)
        yield inputs, inputs[:, :3].argmax(dim=1)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def fail() -> nn.Module:
    raise ZeroDivisionError("the user's own")


class TestTorch(BackendContract):
    @pytest.fixture
    def subject(self) -> Subject:
        task = Task("task.py", build_model, build_data, loss_fn=loss_fn)
        return Subject(registry.load("torch"), task, lambda: replace(task, build_model=fail))


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(inputs)[0][-1])


def time_first(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(16):
        inputs = torch.randn(50, batch_size, 6)
        yield inputs, inputs[0, :, :3].argmax(dim=1)


class TestTorchTimeFirst(BackendContract):
    """Samples are counted where they are: 8 were asked for, 50 time steps lead."""

    @pytest.fixture
    def subject(self) -> Subject:
        task = Task("task.py", LastState, time_first, loss_fn=loss_fn)
        return Subject(registry.load("torch"), task, lambda: replace(task, build_model=fail))


@pytest.mark.parametrize("sliced", [False, True])
def test_what_the_backward_pass_needs_is_counted_without_the_weights(sliced):
    def slices(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        inputs, targets = torch.randn(1000, 6), torch.zeros(1000, dtype=torch.long)
        for start in range(0, 1000 - batch_size, batch_size):
            part = slice(start, start + batch_size)
            yield inputs[part], targets[part]

    task = Task("task.py", build_model, slices if sliced else build_data, loss_fn=loss_fn)
    backend = registry.load("torch")
    facts = backend.describe(
        task, device="cpu", seed=0, batch_size=8, report=lambda phase, step: None
    )
    # Of each sample: the input (6), the tanh (16), the log-softmax (3), the target (an int64).
    # Of the batch: the loss's own total weight, one number.
    assert facts.saved_bytes_per_sample == 4 * (6 + 16 + 3) + 8 + 4 / 8
    assert facts.trainable_bytes == 4 * (6 * 16 + 16 + 16 * 3 + 3)
