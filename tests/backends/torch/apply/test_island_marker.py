"""An island is known by a marker of its own, whatever happens to autocast's weight cache."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from autoprec.backends.torch.apply.precision import Precision
from autoprec.core.recipe import Recipe
from tests.backends.torch.operated import (
    BFLOAT16,
    FLOAT16,
    adam,
    apply,
    batches,
    mlp,
    same,
    weights,
)

pytestmark = pytest.mark.torch

LOW, FULL = torch.bfloat16, torch.float32


class Head(nn.Module):
    """Notes the dtype of its product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result = self.linear(inputs)
        self.seen.append(result.dtype)
        return result.sin()


class Block(nn.Module):
    """An island whose head goes back to autocast."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.head = Head()
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.head(inputs) * 2
        return checkpoint(self.head, inputs, use_reentrant=self.reentrant) * 2


class Net(nn.Module):
    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.block = Block(reentrant=reentrant)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.block(inputs)


ISLAND = replace(BFLOAT16, float32_modules=("block",))
INPUTS = torch.ones(2, 6)


@pytest.mark.parametrize("cached", [True, False])
def test_what_a_user_casts_off_stays_off_below_an_island(cached: bool) -> None:
    model = Net()
    apply(ISLAND, model)
    with torch.autocast("cpu", LOW, cache_enabled=cached):
        model(INPUTS)
        with torch.autocast("cpu", enabled=False):
            model.block.head(INPUTS)
    assert model.block.head.seen == [LOW, FULL]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_as_the_forward_pass_was(cached: bool, reentrant: bool) -> None:
    model = Net(reentrant=reentrant)
    apply(ISLAND, model)
    inputs = INPUTS.clone().requires_grad_()
    with torch.autocast("cpu", LOW, cache_enabled=cached):
        outputs = model(inputs)
    outputs.sum().backward()
    assert model.block.head.seen == [LOW, LOW]


@pytest.mark.parametrize("cached", [True, False])
def test_a_compiled_part_is_recompiled_for_a_call_outside_its_island(cached: bool) -> None:
    torch._dynamo.reset()
    model = Net()
    apply(ISLAND, model)
    model.block.head.compile(backend="eager")
    with torch.autocast("cpu", LOW, cache_enabled=cached):
        model(INPUTS)
        with torch.autocast("cpu", enabled=False):
            model.block.head(INPUTS)
    assert model.block.head.seen == [LOW, FULL]


def step(precision: Precision, called: nn.Module, *, first_without: bool) -> list[torch.Tensor]:
    """Return the gradients of one step, after a call without any in the same context or not."""
    called.zero_grad()
    inputs = torch.ones(4, 6)
    with precision.autocast():
        if first_without:
            with torch.no_grad():
                called(inputs)
        loss = called(inputs).float().square().mean()
    precision.backward(loss)
    found = [parameter.grad for parameter in called.parameters()]
    assert all(grad is not None for grad in found)
    return [grad.clone() for grad in found if grad is not None]


@pytest.mark.parametrize("before", [0, 50])
def test_a_call_without_gradients_takes_none_from_the_next(before: int) -> None:
    model = mlp()
    precision = apply(BFLOAT16, model)
    for _ in range(before):
        step(precision, model, first_without=False)
    found = step(precision, model, first_without=True)
    expected = step(precision, model, first_without=False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nor_does_one_of_a_part_of_the_model() -> None:
    model = mlp()
    precision = apply(BFLOAT16, model)
    expected = step(precision, model[0], first_without=False)
    for _ in range(50):
        found = step(precision, model[0], first_without=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_compiled_model_keeps_its_gradients_as_well() -> None:
    torch._dynamo.reset()
    model = mlp()
    precision = apply(replace(BFLOAT16, compile=True), model, compile_backend="eager")
    inputs = torch.ones(4, 6)
    with precision.autocast():
        with torch.no_grad():
            model(inputs)
        loss = model(inputs).square().mean()
    precision.backward(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often the cache is emptied, for torch that needs it and torch that does not."""
    found: list[int] = []
    clear = torch.clear_autocast_cache

    def count() -> None:
        found.append(1)
        clear()

    monkeypatch.setattr(torch, "clear_autocast_cache", count)
    return found


def test_calls_without_gradients_share_their_casts(cleared: list[int]) -> None:
    model = mlp()
    precision = apply(BFLOAT16, model)
    with torch.no_grad(), precision.autocast():
        for _ in range(3):
            model(torch.ones(4, 6))
        assert cleared == []


@pytest.mark.parametrize(
    ("part", "compiled"),
    [(False, False), (True, False), (False, True)],
    ids=["the model", "a part of it", "a compiled model"],
)
def test_the_cache_is_emptied_between_them_and_a_call_with_gradients(
    cleared: list[int], part: bool, compiled: bool
) -> None:
    torch._dynamo.reset()
    model = mlp()
    precision = apply(replace(BFLOAT16, compile=compiled), model, compile_backend="eager")
    called = model[0] if part else model
    with precision.autocast():
        with torch.no_grad():
            called(torch.ones(4, 6))
            before = len(cleared)
        called(torch.ones(4, 6))
        assert len(cleared) == before + 1
        called(torch.ones(4, 6))
        assert len(cleared) == before + 1


@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("lines", ["precision's", "the scaler's"])
def test_updates_inside_one_context_are_those_of_a_context_each(lines: str, recipe: Recipe) -> None:
    """autocast keeps its casts of the weights until the outermost context is left."""

    def trained(contexts: int) -> list[torch.Tensor]:
        model = mlp()
        optimizer = adam(model)
        precision = apply(recipe, model, optimizer)
        ways = [precision.autocast, nullcontext]
        around, each = ways if contexts == 1 else reversed(ways)
        with around():
            for inputs, targets in batches(4):
                with each():
                    loss = cross_entropy(model(inputs), targets)
                if lines == "precision's":
                    precision.backward_and_step(loss)
                else:
                    precision.scaler.scale(loss).backward()
                    precision.scaler.step(optimizer)
                    precision.scaler.update()
                    optimizer.zero_grad()
        return weights(model)

    assert same(trained(1), trained(4))
