"""Accumulated gradients: what one update averages, clips and flushes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autoprec.errors import AutoprecWarning, UsageError
from tests.backends.torch.operated import (
    FLOAT16,
    FLOAT32,
    RECIPES,
    accumulating,
    adam,
    apply,
    batches,
    mlp,
    same,
    train,
    weights,
)

pytestmark = pytest.mark.torch

CLEARED = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("how", CLEARED)
def test_gradients_cleared_between_micro_batches_are_noticed(how: str) -> None:
    model = mlp()
    optimizer = adam(model)
    precision = apply(accumulating(FLOAT32, 4), model, optimizer)
    before = weights(model)
    (inputs, targets), *_ = batches(1)
    CLEARED[how](model, optimizer)  # at the top of the first micro-batch it clears nothing
    precision.backward(cross_entropy(model(inputs), targets))
    assert not precision.step()
    CLEARED[how](model, optimizer)
    with pytest.raises(UsageError, match=r"gradients of 1 of 4 .* delete optimizer.zero_grad\(\)"):
        precision.backward(cross_entropy(model(inputs), targets))
    assert same(weights(model), before)


def test_gradients_that_are_clipped_or_zero_by_themselves_are_not_taken_for_cleared() -> None:
    model = mlp()
    precision = apply(accumulating(FLOAT32, 3), model, adam(model))
    for inputs, targets in batches(3):
        precision.backward(cross_entropy(model(inputs), targets))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if precision.on_boundary:
            assert precision.step()
    for inputs, _ in batches(3):
        precision.backward(0 * model(inputs).sum())
        precision.step()


def test_a_schedule_stepped_for_every_micro_batch_is_warned_of_once() -> None:
    model = mlp()
    optimizer = adam(model)
    precision = apply(accumulating(FLOAT32, 2), model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore", UserWarning)  # torch's: stepped before the optimizer
        warnings.simplefilter("always", AutoprecWarning)
        for inputs, targets in batches(8):
            precision.backward(cross_entropy(model(inputs), targets))
            precision.step()
            scheduler.step()
    (warning,) = caught
    assert "between the 2 micro-batches" in str(warning.message)
    assert warning.filename == __file__


def test_a_schedule_stepped_for_every_update_is_not_warned_of() -> None:
    model = mlp()
    optimizer = adam(model)
    precision = apply(accumulating(FLOAT32, 2), model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for inputs, targets in batches(8):
        precision.backward(cross_entropy(model(inputs), targets))
        if precision.step():
            scheduler.step()
    assert scheduler.last_epoch == 4


def test_accumulated_gradients_are_the_mean_over_the_micro_batches() -> None:
    data = batches(4)
    split, whole = mlp(), mlp()
    precision = apply(accumulating(FLOAT32, 4), split, torch.optim.SGD(split.parameters(), lr=1.0))
    assert train(precision, split, data) == [False, False, False, True]
    inputs, targets = (torch.cat(parts) for parts in zip(*data, strict=True))
    unsplit = apply(FLOAT32, whole, torch.optim.SGD(whole.parameters(), lr=1.0))
    train(unsplit, whole, [(inputs, targets)])
    for ours, theirs in zip(weights(split), weights(whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert precision.steps == 1


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_clipping_acts_on_the_boundary_only_and_on_unscaled_gradients(name: str) -> None:
    model = mlp()
    precision = apply(
        accumulating(RECIPES[name], 2), model, torch.optim.SGD(model.parameters(), lr=0.0)
    )
    norms = []
    for inputs, targets in batches(4):
        with precision.autocast():
            loss = cross_entropy(model(inputs), targets)
        precision.backward(loss)
        norms.append(precision.clip_grad_norm_(1e-3))
        if norms[-1] is not None:
            assert precision.clip_grad_norm_(1e-3).item() == pytest.approx(1e-3, rel=1e-3)
            precision.clip_grad_value_(1e-5)
            assert max(p.grad.abs().max() for p in model.parameters()) <= 1e-5
        precision.step()
    assert [norm is None for norm in norms] == [True, False, True, False]
    assert all(norm is None or 0.01 < norm.item() < 10 for norm in norms)


def test_a_second_loss_of_the_same_micro_batch_is_not_counted() -> None:
    model = mlp()
    precision = apply(accumulating(FLOAT32, 2), model, adam(model))
    changed = []
    for inputs, targets in batches(4):
        loss = cross_entropy(model(inputs), targets)
        precision.backward(loss, last=False, retain_graph=True)
        precision.backward(loss)
        changed.append(precision.step())
    assert changed == [False, True, False, True]


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_flush_steps_with_the_mean_over_the_micro_batches_seen(name: str) -> None:
    data = batches(6)
    flushed, exact = mlp(), mlp()
    precision = apply(accumulating(RECIPES[name], 4), flushed, adam(flushed))
    train(precision, flushed, data)
    assert precision.flush()
    assert not precision.flush()
    assert precision.steps == 2
    first = apply(accumulating(RECIPES[name], 4), exact, optimizer := adam(exact))
    train(first, exact, data[:4])
    second = apply(accumulating(RECIPES[name], 2), exact, optimizer)
    train(second, exact, data[4:])
    for ours, theirs in zip(weights(flushed), weights(exact), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_flush_clips_as_the_loop_did() -> None:
    model = mlp()
    before = weights(model)
    precision = apply(accumulating(FLOAT32, 4), model, torch.optim.SGD(model.parameters(), lr=1.0))
    train(precision, model, batches(3), clip=0.01)
    assert same(before, weights(model))
    precision.flush()
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, weights(model), strict=True)])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_flushed_overflow_is_skipped() -> None:
    model = mlp()
    before = weights(model)
    precision = apply(accumulating(FLOAT16, 4), model, adam(model))
    train(precision, model, batches(2), overflow_at=(1,))
    assert not precision.flush()
    assert same(before, weights(model))
    assert precision.skipped == 1
    assert all(p.grad is None for p in model.parameters())


class WithNoSync(nn.Sequential):
    """Remembers which forwards ran inside no_sync, as DistributedDataParallel would read it."""

    inside = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = [*getattr(self, "seen", []), self.inside]
        return super().forward(inputs)


def test_only_the_last_micro_batch_synchronises() -> None:
    model = WithNoSync(nn.Linear(6, 3))
    precision = apply(accumulating(FLOAT32, 3), model, adam(model))
    train(precision, model, batches(6))
    # The very first forward cannot know yet that `backward` will count: it synchronises once more.
    assert model.seen == [False, True, False, True, True, False]
