"""The backend contract on a CUDA device; `make test-gpu` runs it where there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract import FLOAT16, QUICK, BackendContract, Subject
from torch import nn

from autoprec import Recipe, apply_profile
from autoprec.backends import registry
from autoprec.backends.base import Task

pytestmark = pytest.mark.gpu


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def build_data(batch_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = []
    for _ in range(16):
        inputs = torch.randn(batch_size, 6)
        batches.append((inputs, inputs[:, :3].argmax(dim=1)))
    return batches


def fail() -> nn.Module:
    raise ZeroDivisionError("the user's own")


TASK = Task("task.py", build_model, build_data, loss_fn=nn.functional.cross_entropy)


class TestTorchOnCuda(BackendContract):
    device = "cuda"

    @pytest.fixture
    def subject(self) -> Subject:
        return Subject(registry.load("torch"), TASK, lambda: replace(TASK, build_model=fail))


def test_a_model_on_the_device_trains_with_a_scaler() -> None:
    model = build_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = apply_profile(FLOAT16, model=model, optimizer=optimizer)
    for inputs, targets in build_data(8)[:4]:
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(inputs.cuda()), targets.cuda())
        precision.backward(loss)
        assert precision.step()
    assert precision.skipped == 0


def test_events_time_steps_like_the_clock() -> None:
    backend = registry.load("torch")
    session = backend.open(
        TASK, Recipe(batch_size=64), device="cuda", seed=0, report=lambda phase, step: None
    )
    measured = session.time_steps(QUICK)
    session.close()
    assert 0 < measured.step_seconds < 1
    assert measured.peak_memory_bytes > 0
