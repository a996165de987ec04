"""Loops whose weights no torch.optim.Optimizer updates are told what they leave out, once."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

from autoprec.backends.torch.apply import noticed_steps
from autoprec.errors import AutoprecWarning, UsageError
from tests.backends.torch.operated import BFLOAT16, FLOAT16, FLOAT32, adam, apply, batches, mlp

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _no_other_steps_are_noticed() -> None:
    """Models of other tests may be alive still."""
    for check in list(noticed_steps._NOTICING):
        check.end()


class Lion:
    """Sign momentum, as people write it out of the paper."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.momentum = [torch.zeros_like(each) for each in self.parameters]

    def step(self) -> None:
        for parameter, kept in zip(self.parameters, self.momentum, strict=True):
            if parameter.grad is not None:
                parameter.data.sub_(self.lr * (0.9 * kept + 0.1 * parameter.grad).sign())
                kept.mul_(0.99).add_(parameter.grad, alpha=0.01)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


Loop = Callable[[Any, nn.Module], None]


def own_class(precision: Any, model: nn.Module) -> None:
    optimizer = Lion(model.parameters())
    for inputs, targets in batches(6):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def by_hand(precision: Any, model: nn.Module) -> None:
    for inputs, targets in batches(6):
        loss = cross_entropy(model(inputs), targets)
        found = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.sub_(0.1 * gradient)


def functional(precision: Any, model: nn.Module) -> None:
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}

    def loss_of(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, weights, (inputs,)), targets)

    for inputs, targets in batches(6):
        found = grad(loss_of)(weights, inputs, targets)
        weights = {name: each - 0.1 * found[name] for name, each in weights.items()}


def forward_alone(precision: Any, model: nn.Module) -> None:
    optimizer = Lion(model.parameters())
    for inputs, targets in batches(6):
        cross_entropy(precision.forward(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def backward_too(precision: Any, model: nn.Module) -> None:
    optimizer = Lion(model.parameters())
    for inputs, targets in batches(6):
        precision.backward(cross_entropy(precision.forward(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def in_float16(precision: Any, model: nn.Module) -> None:
    optimizer = Lion(model.parameters())
    for inputs, targets in batches(6):
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def without_updates(precision: Any, model: nn.Module) -> None:
    for inputs, targets in batches(9):
        cross_entropy(model(inputs), targets)
        cross_entropy(precision.forward(inputs), targets)


def accumulated_first(precision: Any, model: nn.Module) -> None:
    optimizer = adam(model)
    for inputs, targets in batches(8):
        cross_entropy(model(inputs), targets).backward()
    for inputs, targets in batches(2):
        precision.backward(cross_entropy(precision.forward(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def around_the_loss(precision: Any, model: nn.Module) -> None:
    for inputs, targets in batches(4):
        outputs = model(inputs)
        with precision.autocast():
            loss = cross_entropy(outputs, targets)
        precision.backward_and_step(loss)


def told(loop: Loop, recipe: Any) -> list[str]:
    """What a loop is warned of, over two runs of it."""
    model = mlp()
    precision = apply(recipe, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(precision, model)
        loop(precision, model)
    assert all(issubclass(each.category, AutoprecWarning) for each in caught)
    assert all(each.filename == __file__ for each in caught), caught
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("loop", "recipe", "said"),
    [
        (own_class, BFLOAT16, "runs in float32 and not in mixed_bfloat16"),
        (by_hand, BFLOAT16, "runs in float32 and not in mixed_bfloat16"),
        (functional, BFLOAT16, "runs in float32 and not in mixed_bfloat16"),
        (in_float16, BFLOAT16, "autocast in float16 that is not the profile's"),
        (own_class, FLOAT16, "float16: neither .*; the loss is not scaled, which float16 needs"),
        (forward_alone, FLOAT16, "the loss is not scaled, which float16 needs"),
        (backward_too, FLOAT16, "gradients stay multiplied by the loss scale"),
    ],
)
def test_what_was_seen_and_what_to_write_is_said_once(loop: Loop, recipe: Any, said: str) -> None:
    (text,) = told(loop, recipe)
    assert re.search(said, text), text
    assert "though no torch.optim.Optimizer steps" in text
    assert "loss_fn(precision.forward(inputs), targets)\nin place of model(inputs)" in text
    assert ("derive yours from it" in text) is (recipe is FLOAT16)


@pytest.mark.parametrize(
    ("loop", "recipe"),
    [
        (own_class, FLOAT32),
        (functional, FLOAT32),
        (forward_alone, BFLOAT16),
        (backward_too, BFLOAT16),
        (without_updates, BFLOAT16),
        (without_updates, FLOAT16),
        (accumulated_first, BFLOAT16),
    ],
)
def test_a_loop_that_does_it_is_told_nothing(loop: Loop, recipe: Any) -> None:
    assert told(loop, recipe) == []


def test_an_autocast_around_the_loss_alone_is_none_around_the_model() -> None:
    model = mlp()
    optimizer = adam(model)
    precision = apply(BFLOAT16, model, optimizer)
    with pytest.warns(AutoprecWarning, match="runs in float32 and not in mixed_bfloat16"):
        around_the_loss(precision, model)


def test_a_copy_and_a_saved_model_know_nothing_of_it() -> None:
    model = mlp()
    precision = apply(BFLOAT16, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            own_class(precision, other)


def test_a_loss_scale_says_what_an_optimizer_of_ones_own_lacks() -> None:
    model = mlp()
    precision = apply(FLOAT16, model)
    precision.scaler.scale(precision.forward(torch.ones(2, 6)).sum()).backward()
    for method in (precision.scaler.step, precision.scaler.unscale_):
        with pytest.raises(UsageError, match=r"Lion given, expected a torch\.optim\.Optimizer, "):
            method(Lion(model.parameters()))


def test_an_optimizer_of_ones_own_that_is_given_is_told_what_to_do() -> None:
    model = mlp()
    with pytest.raises(UsageError, match=r"Lion given.*or leave it out, call precision\.forward"):
        apply(BFLOAT16, model, Lion(model.parameters()))  # type: ignore[arg-type]
