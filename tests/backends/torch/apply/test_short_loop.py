"""The short form of the loop: it computes what the documented one does, to the last update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autoprec.core.recipe import Recipe
from tests.backends.torch.operated import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    apply,
    batches,
    mlp,
    same,
    weights,
)

RECIPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_full(recipe: Recipe, model: nn.Module, data: list[Any]) -> int:
    precision = apply(recipe, model, sgd(model))
    updates = 0
    for inputs, targets in data:
        with precision.autocast():
            outputs = model(inputs)
        precision.backward(cross_entropy(outputs, targets))
        precision.clip_grad_norm_(0.1)
        updates += precision.step()
    return updates + precision.flush()


def in_short(recipe: Recipe, model: nn.Module, data: list[Any]) -> int:
    precision = apply(recipe, model, sgd(model))
    updates = 0
    for inputs, targets in precision.batches(data):
        loss = cross_entropy(precision.forward(inputs), targets)
        updates += precision.backward_and_step(loss, max_norm=0.1)
    assert not precision.flush()  # nothing is left
    assert updates == precision.updates_in(len(data))
    return updates


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("count", [1, 4, 7, 8])
def test_it_trains_as_the_loop_in_full_does(name: str, count: int) -> None:
    recipe = replace(RECIPES[name], accumulation_steps=4)
    data, (ours, theirs) = batches(count), (mlp(), mlp())
    assert in_short(recipe, ours, data) == in_full(recipe, theirs, data) == -(-count // 4)
    assert same(weights(ours), weights(theirs))
    assert not same(weights(ours), weights(mlp()))


def test_the_outputs_are_float32_and_computed_in_16_bits() -> None:
    model = mlp()
    (inputs, _), *_ = batches(1)
    exact = model(inputs)
    precision = apply(BFLOAT16, model, sgd(model))
    outputs = precision.forward(inputs)
    assert outputs.dtype is torch.float32
    assert not torch.equal(outputs, exact)
    assert torch.equal(model(inputs), exact)  # outside, where evaluation may stay, it is float32


def test_an_epoch_of_nothing_is_none() -> None:
    model = mlp()
    precision = apply(replace(FLOAT32, accumulation_steps=4), model, sgd(model))
    assert list(precision.batches([])) == []
    assert precision.updates_in(0) == 0


def test_a_loop_that_is_left_early_leaves_the_rest_to_flush() -> None:
    """Also where it is left at the last micro-batch: what follows is no epoch's end."""
    for left_at in (1, 2):
        model = mlp()
        precision = apply(replace(FLOAT32, accumulation_steps=4), model, sgd(model))
        data = batches(3)
        for index, (inputs, targets) in enumerate(precision.batches(data)):
            loss = cross_entropy(precision.forward(inputs), targets)
            if index == left_at:
                break
            assert not precision.backward_and_step(loss)
        assert not precision.backward_and_step(loss)
        assert precision.flush()


def test_an_overflow_in_the_last_update_is_no_update() -> None:
    model = mlp()
    precision = apply(replace(FLOAT16, accumulation_steps=2), model, sgd(model))
    changed = []
    for index, (inputs, targets) in enumerate(precision.batches(batches(3))):
        loss = cross_entropy(precision.forward(inputs), targets)
        changed.append(precision.backward_and_step(loss * (1e38 if index == 2 else 1.0)))
    assert changed == [False, True, False]
    assert precision.skipped == 1
