"""What keeping a model's buffers costs, what it leaves alone, and what is left of it afterwards."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.torch.apply import kept_buffers
from tests.backends.torch.buffered import averages, convolutions, samples, state, step, unchanged
from tests.backends.torch.operated import BFLOAT16, FLOAT16, adam, apply, same

pytestmark = pytest.mark.torch


def test_training_without_overflow_is_the_same_bit_for_bit() -> None:
    results = []
    for kept in (True, False):
        model = averages()
        precision = apply(FLOAT16, model, adam(model))
        if not kept:
            precision.scaler.buffers = None
        for batch in samples(8):
            assert step(precision, model, batch)
        results.append([*model.parameters(), *model.buffers()])
    assert same(*results)


def test_nothing_waits_for_the_device_but_the_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = 0

    def counting(name: str) -> None:
        method = getattr(torch.Tensor, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal waits
            waits += 1
            return method(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)

    model = convolutions()
    precision = apply(FLOAT16, model, torch.optim.SGD(model.parameters()))
    data = samples(4, overflowing=[0, 2])
    for name in ("item", "__bool__", "__float__", "__int__", "cpu", "tolist", "numpy"):
        counting(name)
    for inputs, targets in data:
        loss = nn.functional.cross_entropy(precision.forward(inputs), targets)
        precision.scaler.scale(loss).backward()
        precision.scaler.step(precision.optimizers[0])
        precision.scaler.update()
        precision.optimizers[0].zero_grad()
    assert precision.skipped == 2
    assert waits == len(data)  # GradScaler's own


def test_large_buffers_are_held_twice_only_if_steps_change_them() -> None:
    class Queue(nn.Module):
        mask: torch.Tensor
        queue: torch.Tensor
        average: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(1024, 512))
            self.register_buffer("queue", torch.zeros(1024, 512))
            self.register_buffer("average", torch.zeros(1024, 512))
            self.linear = nn.Linear(6, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            with torch.no_grad():
                self.queue[: len(h)] = h
            logits: torch.Tensor = h @ self.queue.to(h.dtype).T + self.mask[:, 0]
            return logits

    model = Queue()
    precision = apply(FLOAT16, model, adam(model))
    assert precision.scaler.buffers is not None
    for index, batch in enumerate(samples(4, overflowing=[0, 2])):
        before = state(model)
        changed = step(precision, model, batch)
        assert unchanged(model, before) is (index in (0, 2)) is not changed
        model.average.lerp_(model.queue, 0.5)  # between steps, as an average of weights is
        large = precision.scaler.buffers._buffers.by_version
        held = [kept.name for kept in large if kept.copy is not None]
        assert held == ["queue"]


def test_buffers_that_cannot_be_written_to_are_no_obstacle() -> None:
    model = convolutions()
    model.register_buffer("expanded", torch.zeros(1, 1).expand(4, 4))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with torch.inference_mode():
        model.register_buffer("inference", torch.ones(3))
    precision = apply(FLOAT16, model, adam(model))
    for batch in samples(3, overflowing=[1]):
        step(precision, model, batch)
    assert (precision.steps, precision.skipped) == (2, 1)


def test_a_model_moved_or_extended_after_the_profile_is_followed() -> None:
    model = averages()
    precision = apply(FLOAT16, model, adam(model))
    model.double().float()  # other tensors
    model.register_buffer("late", torch.zeros(3))
    before = state(model)
    step(precision, model, samples(1, overflowing=[0])[0])
    assert unchanged(model, before)


def test_restoring_and_applying_again_leave_nothing_behind() -> None:
    model = averages()
    optimizer = adam(model)
    first = apply(FLOAT16, model, optimizer)
    second = apply(FLOAT16, model, optimizer)
    first.restore()
    before = state(model)
    step(second, model, samples(1, overflowing=[0])[0])
    assert unchanged(model, before)
    second.restore()
    assert "forward" not in model.__dict__
    assert second.scaler.buffers is None
    assert model not in kept_buffers._KEPT
    precision = apply(BFLOAT16, model, optimizer)
    assert precision.scaler.buffers is None
    assert model not in kept_buffers._KEPT


def test_nothing_of_ours_keeps_a_model_alive_or_travels_with_its_copy() -> None:
    model = averages()
    precision = apply(FLOAT16, model, adam(model))
    step(precision, model, samples(1)[0])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = state(model)
        with precision.autocast():
            again(samples(1)[0][0])
        assert unchanged(model, before)
    assert copy.deepcopy(precision.scaler).buffers is None
    gone = weakref.ref(model)
    del model, precision, again
    gc.collect()
    assert gone() is None
