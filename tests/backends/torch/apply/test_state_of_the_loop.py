"""A skipped float16 step spoils no state of the loop's own objects, and its variables are named."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.errors import AutoprecWarning
from tests.backends.torch.buffered import samples
from tests.backends.torch.operated import FLOAT16, adam, apply

pytestmark = pytest.mark.torch


class Normaliser:
    """Is no module, as those of rewards and targets are written."""

    def __init__(self) -> None:
        self.mean, self.number = torch.zeros(3), 0.0

    def __call__(self, outputs: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        self.number = 0.9 * self.number + float(outputs.detach().mean())
        return outputs - self.mean


def normaliser() -> Callable[[Tensor], Tensor]:
    """Make a function that keeps a mean, in a list, in a variable and as a number."""
    mean, number, means = torch.zeros(3), 0.0, [torch.zeros(3)]

    def normalise(outputs: Tensor) -> Tensor:
        nonlocal mean, number
        mean = 0.9 * mean + 0.1 * outputs.detach().mean(0)
        number = 0.9 * number + float(outputs.detach().mean())
        means[0] = 0.9 * means[0] + 0.1 * outputs.detach().mean(0)
        return outputs - mean - means[0] - number

    return normalise


class Loop:
    """A training loop in an object, which holds one more."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.normalise, self.make = make(), make

    def train(self, at: int) -> Tensor:
        torch.manual_seed(0)
        model, normalise = nn.Linear(6, 3), self.make()
        precision = apply(FLOAT16, model, adam(model))
        for index, (inputs, targets) in enumerate(samples(7, overflowing=[at])):
            outputs = normalise(self.normalise(precision.forward(inputs)))
            loss = nn.functional.cross_entropy(outputs, targets)
            assert precision.backward_and_step(loss) is (index != at)
        return loss.detach()


@pytest.mark.parametrize("make", [Normaliser, normaliser])
@pytest.mark.parametrize("at", [1, 5])
def test_a_skipped_step_leaves_nothing_infinite_in_what_the_loop_calls(
    at: int, make: Callable[[], Any]
) -> None:
    assert Loop(make).train(at).isfinite()


class Closed:
    """Can be called, but neither asked for what it does not have nor referred to weakly."""

    __slots__ = ("unset",)

    def __call__(self, outputs: Tensor) -> Tensor:
        return outputs

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_objects_that_can_only_be_called_are_left_alone() -> None:
    assert Loop(Closed).train(1).isfinite()


def trained_with_a_mean_of_its_own(at: int, *, only_after_updates: bool) -> int:
    """Train by a loop that keeps a mean in a variable, and a number in a dict; count its skips."""
    torch.manual_seed(0)
    model, mean, kept = nn.Linear(6, 3), torch.zeros(3), {"number": 0.0}
    precision = apply(FLOAT16, model, adam(model))
    for inputs, targets in samples(6, overflowing=[at]):
        outputs = precision.forward(inputs)
        now = 0.9 * mean + 0.1 * outputs.detach().mean(0)
        number = 0.9 * kept["number"] + float(outputs.detach().mean())
        if not only_after_updates:
            mean, kept["number"] = now, number
        loss = nn.functional.cross_entropy(outputs - now - number, targets)
        if precision.backward_and_step(loss):
            mean, kept["number"] = now, number
    assert only_after_updates is bool(mean.isfinite().all())
    assert only_after_updates is math.isfinite(kept["number"])
    return precision.skipped


def test_variables_of_the_loop_that_keep_what_overflowed_are_named_once() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert trained_with_a_mean_of_its_own(2, only_after_updates=False) == 4
    (said,) = [str(each.message) for each in seen if each.category is AutoprecWarning]
    assert said.startswith("three steps in a row were skipped, and the loss is not finite")
    assert "mean" in said
    assert "kept['number']" in said
    assert "precision.backward_and_step(loss)" in said


def test_a_loop_that_assigns_its_state_after_updates_only_is_not_warned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained_with_a_mean_of_its_own(2, only_after_updates=True) == 1
