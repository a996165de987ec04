"""Micro-batches of one update that do not hold as much as each other are found, and said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy, Recipe, apply_profile
from autoprec.backends.torch.apply.precision import Precision
from autoprec.core.recipe import LossScale
from autoprec.errors import AutoprecWarning

Loop = Callable[[Precision, nn.Module, Iterable[Any]], None]
SPLIT = Recipe(batch_size=4, accumulation_steps=2)
UNEQUAL = r"one update hold 4, 1 samples.*drop_last=True"


def pairs(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.ones(size, 3), torch.zeros(size)) for size in sizes]


def with_batches(precision: Precision, model: nn.Module, loader: Iterable[Any]) -> None:
    for inputs, targets in precision.batches(loader):
        with precision.autocast():
            outputs = model(inputs)
        precision.backward_and_step((outputs.flatten() - targets).square().mean())


def with_forward(precision: Precision, model: nn.Module, loader: Iterable[Any]) -> None:
    for inputs, targets in loader:
        precision.backward((precision.forward(inputs).flatten() - targets).square().mean())
        precision.step()


def trained(loop: Loop, batches: Iterable[Any], recipe: Recipe = SPLIT) -> list[str]:
    """Train; return what was said of unequal micro-batches."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = apply_profile(recipe, model=model, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(precision, model, batches)
    return [str(each.message) for each in caught if "one update hold" in str(each.message)]


@pytest.mark.parametrize("loop", [with_batches, with_forward])
@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_FLOAT16])
def test_a_short_last_batch_beside_others_is_said_once(loop: Loop, policy: Policy) -> None:
    scale = LossScale(initial=64.0) if policy.needs_loss_scale else None
    recipe = Recipe(policy=policy, batch_size=4, accumulation_steps=2, loss_scale=scale)
    (said,) = trained(loop, pairs(4, 4, 4, 1) * 3, recipe)
    assert "hold 4, 1 samples, and each of them counts as much" in said
    assert "drop_last=True" in said


@pytest.mark.parametrize(
    ("batches", "recipe"),
    [
        (pairs(4, 4, 4, 4), SPLIT),
        (pairs(4, 4, 1), SPLIT),  # an update of its own
        (pairs(4, 4, 4, 3), SPLIT),  # a sample counts a third more: so loaders end
        (pairs(4, 4, 2, 2), SPLIT),
        (pairs(4, 1, 4, 1), Recipe(batch_size=4)),
    ],
)
@pytest.mark.parametrize("loop", [with_batches])
def test_what_trains_as_it_should_is_not_spoken_of(
    loop: Loop, batches: list[Any], recipe: Recipe
) -> None:
    assert trained(loop, batches, recipe) == []


def test_samples_that_no_dimension_counts_are_not_compared() -> None:
    """As of graphs: nodes in one dimension, graphs in another."""

    def loop(precision: Precision, model: nn.Module, loader: Iterable[Any]) -> None:
        for nodes, graphs in precision.batches(loader):
            precision.backward_and_step((model(nodes).sum() - graphs).square().mean())

    graphs = [(torch.ones(nodes, 3), torch.zeros(4)) for nodes in (7, 9, 5, 6)]
    assert trained(loop, graphs) == []


def test_a_batch_that_is_evaluated_in_between_is_none_of_the_updates() -> None:
    def loop(precision: Precision, model: nn.Module, loader: Iterable[Any]) -> None:
        for inputs, _ in loader:
            with torch.no_grad():
                precision.forward(torch.ones(9, 3))
            precision.backward_and_step(precision.forward(inputs).square().mean())

    assert trained(loop, pairs(4, 4, 4, 4)) == []


def labelled(*valid: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of two sequences of five labels, of which so many are valid."""
    batches = []
    for count in valid:
        labels = torch.full((10,), -100)
        labels[:count] = 1
        batches.append((torch.ones(2, 3), labels.view(2, 5)))
    return batches


def of_tokens(precision: Precision, model: nn.Module, loader: Iterable[Any]) -> None:
    for inputs, _ in precision.batches(loader):
        precision.backward_and_step(precision.forward(inputs).square().mean())


def test_labels_that_differ_in_number_are_said_once() -> None:
    (said,) = trained(of_tokens, labelled(9, 2, 7, 1, 3, 8))
    assert "hold 9, 2 labels" in said
    assert "labels of the whole update" in said
    assert trained(of_tokens, labelled(5, 5, 5, 5)) == []


def test_it_is_a_warning_that_can_be_silenced() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = apply_profile(SPLIT, model=model, optimizer=optimizer)
    with pytest.warns(AutoprecWarning, match=UNEQUAL):
        with_batches(precision, model, pairs(4, 1))
