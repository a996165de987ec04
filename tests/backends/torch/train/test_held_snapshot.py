"""State that is no parameter or buffer is put back, starts alike in all runs, and is compared."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends.torch.train.model_state import (
    buffer_values,
    restore_snapshot,
    scale_buffers,
    take_snapshot,
)
from tests.backends.torch.traced import BFLOAT16, FLOAT16, FLOAT32, tracer

pytestmark = pytest.mark.torch


class Helper:
    def __init__(self) -> None:
        self.sums = torch.zeros(4)


class Keeping(nn.Module):
    """Keeps what its outputs are in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.sums, self.last = torch.zeros(4), None
        self.pair = (torch.zeros(4), 0)
        self.queue: list[Tensor] = []
        self.stats: dict[str, Tensor] = {}
        self.helper, self.steps, self.scale = Helper(), 0, 1.0
        self.shared = self.helper.sums

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        mean = h.detach().mean(0)
        self.sums = self.sums + mean
        self.last = h
        self.pair = (self.pair[0] + mean, self.pair[1] + 1)
        self.queue.append(mean)
        self.stats["mean"] = mean.clone()
        self.helper.sums += mean
        self.steps += 1
        self.scale *= 0.5
        return h.sum(-1) / self.scale


def test_a_snapshot_of_one_build_is_put_into_another_one() -> None:
    first, second = Keeping(), Keeping()
    inputs = torch.randn(8, 6)
    start = take_snapshot(first)
    first(inputs)
    after = take_snapshot(first)
    expected = first(inputs)
    for _ in range(3):
        second(inputs)
    restore_snapshot(second, after)
    assert (second.steps, second.scale, len(second.queue)) == (1, 0.5, 1)
    assert second.pair[1] == 1
    assert second.shared is second.helper.sums
    assert torch.equal(second(inputs), expected)
    for name, value in buffer_values(first, None).items():
        torch.testing.assert_close(buffer_values(second, None)[name], value, rtol=0, atol=0)
    restore_snapshot(second, start)
    assert (second.last, second.queue, second.stats, second.steps) == (None, [], {}, 0)
    assert not second.sums.any()


def test_it_is_named_and_scaled_like_a_buffer() -> None:
    model = Keeping()
    model(torch.randn(8, 6))
    kept = take_snapshot(model)
    found = buffer_values(model, kept)
    assert {"sums", "pair[0]", "queue[0]", "stats['mean']", "helper.sums"} <= found.keys()
    scaled = scale_buffers(kept, ["sums", "queue[0]"], 2.0)
    restore_snapshot(model, scaled)
    for name, value in found.items():
        factor = 2.0 if name in ("sums", "queue[0]") else 1.0
        torch.testing.assert_close(buffer_values(model, None)[name], factor * value)


def images(batch_size: int) -> Any:
    for _ in range(8):
        x = torch.randn(batch_size, 6)
        yield x, x.sum(-1)


class Rounded(nn.Module):
    """Adds up its outputs, in the precision they have, and 30 with them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 16), nn.Linear(16, 1)
        nn.init.constant_(self.hidden.bias, 30.0)
        self.sums = torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        self.sums = self.sums + h.detach().sum(0)
        found: Tensor = self.head(h - 30.0).flatten()
        return found


class Scaled(nn.Module):
    """A loss in parts of its own average, which it keeps in a buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(outputs, targets)
        self.average.lerp_(loss.detach(), 0.5)
        return loss / self.average


LOSS = Scaled()


def scaled_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    found: Tensor = LOSS(outputs, targets)
    return found


def test_sums_in_an_attribute_and_averages_of_a_loss_are_compared() -> None:
    trace = tracer(build_model=Rounded, loss_fn=scaled_loss)
    trace.reference(batch_size=8, steps=3, checkpoints=(0, 2))
    found = trace.compare_steps(recipe=BFLOAT16)
    for point in found:
        errors = {each.name: each.error for each in point.buffers}
        assert errors.keys() == {"sums", "LOSS.average"}
        assert all(error is not None and 0 < error < 0.1 for error in errors.values())
    assert {each.name for each in found[-1].buffers if each.rounded} == {"sums"}


class Averaged(nn.Module):
    """Keeps an average that begins as its first outputs come, in the precision they have."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 16), nn.Linear(16, 1)
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        mean = h.detach().mean(0)
        self.mean = mean if self.mean is None else 0.99 * self.mean + 0.01 * mean
        found: Tensor = self.head(h - self.mean).flatten()
        return found


def test_an_average_that_the_model_keeps_in_16_bits_is_compared_in_them() -> None:
    """Float32's own in its place would lend it digits, and hide that it loses what is added."""
    trace = tracer(build_model=Averaged)
    trace.reference(batch_size=8, steps=3, checkpoints=(0, 1, 2))
    last = trace.compare_steps(recipe=BFLOAT16)[-1]
    assert [(each.name, each.stalls) for each in last.buffers] == [("mean", True)]


@pytest.mark.parametrize("loss", [scaled_loss, LOSS, partial(scaled_loss)])
def test_all_runs_start_with_the_same_state_of_the_loss(loss: Any) -> None:
    LOSS.average.fill_(1.0)
    trace = tracer(loss_fn=loss)
    known = trace.trajectory(recipe=FLOAT32, seed=0, steps=3).losses
    other = trace.trajectory(recipe=FLOAT32, seed=1, steps=3).losses
    assert trace.trajectory(recipe=FLOAT32, seed=0, steps=3).losses == known
    assert tracer(loss_fn=Scaled()).trajectory(recipe=FLOAT32, seed=1, steps=3).losses == other


def test_a_skipped_step_of_a_proof_leaves_the_loss_finite() -> None:
    """A loss that is not finite is the run's last; what the loss keeps is as before it."""

    def overflowing(batch_size: int) -> Any:
        for step, (x, y) in enumerate(images(batch_size)):
            yield x * (1e6 if step == 2 else 1.0), y

    run = tracer(loss_fn=scaled_loss, build_data=overflowing).trajectory(
        recipe=FLOAT16, seed=0, steps=6
    )
    assert run.skipped == (2,)
    assert [loss is None for loss in run.losses] == [False, False, True]
    assert LOSS.average.isfinite()
