"""Copies of a model that train in float32, though it has a profile, are told of once."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.optim.swa_utils import AveragedModel

from autoprec.backends.torch.apply import noticed_steps
from autoprec.errors import AutoprecWarning
from tests.backends.torch.operated import BFLOAT16, FLOAT16, FLOAT32, adam, apply, batches, mlp

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _no_other_steps_are_noticed() -> None:
    """Models of other tests may be alive still."""
    for check in list(noticed_steps._NOTICING):
        check.end()


def trained(model: nn.Module, steps: int = 4) -> None:
    """Train in a plain loop."""
    optimizer = adam(model)
    for inputs, targets in batches(steps):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def saved(model: nn.Module) -> Any:
    """A model that was saved whole."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def told(run: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(each.filename == __file__ for each in caught), caught
    assert all(issubclass(each.category, AutoprecWarning) for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("made", [copy.deepcopy, saved])
@pytest.mark.parametrize("after", [0, 5])
def test_copies_that_a_plain_loop_trains_are_told_of_once(
    recipe: Any, made: Callable[[nn.Module], nn.Module], after: int
) -> None:
    """Clients of federated learning, say, before the model itself was trained, or afterwards."""
    model = mlp()
    precision = apply(recipe, model, adam(model))
    for inputs, targets in batches(after):
        precision.backward_and_step(cross_entropy(precision.forward(inputs), targets))
    copies = [made(model)]
    copies.append(copy.deepcopy(copies[0]))
    (text,) = told(lambda: [trained(each) for each in copies])  # type: ignore[arg-type]
    assert text.startswith("a copy of a model that a profile was applied to trains in float32")
    assert f"and not in {recipe.policy}" in text
    assert not [each for each in noticed_steps._NOTICING if each is not precision.loop_check]


def evaluated(precision: Any, copied: nn.Module) -> None:
    for inputs, _ in batches(4):
        with torch.no_grad():
            copied(inputs)


def explained(precision: Any, copied: nn.Module) -> None:
    """Gradients of the inputs, beside a training of something else."""
    other = mlp()
    trained(other)
    for inputs, _ in batches(4):
        copied(inputs.requires_grad_()).sum().backward()
    trained(other)


def averaged(precision: Any, copied: nn.Module) -> None:
    """An average of weights that forgets `no_grad`."""
    average, source = AveragedModel(copied), mlp()
    for inputs, _ in batches(4):
        average.update_parameters(source)
        average(inputs)


def under_autocast(precision: Any, copied: nn.Module) -> None:
    optimizer = adam(copied)
    for inputs, targets in batches(4):
        with precision.autocast():
            outputs = copied(inputs)
        cross_entropy(outputs, targets).backward()
        optimizer.step()


def with_a_profile(precision: Any, copied: nn.Module) -> None:
    optimizer = adam(copied)
    own = apply(BFLOAT16, copied, optimizer)
    for inputs, targets in batches(4):
        own.backward_and_step(cross_entropy(own.forward(inputs), targets))


def without_profile(precision: Any, copied: nn.Module) -> None:
    precision.restore()
    trained(copied)


@pytest.mark.parametrize(
    "use", [evaluated, explained, averaged, under_autocast, with_a_profile, without_profile]
)
def test_copies_that_do_not_train_in_float32_are_not_told_of(use: Callable[..., None]) -> None:
    model = mlp()
    precision = apply(BFLOAT16, model, adam(model))
    copied = copy.deepcopy(model)
    assert told(lambda: use(precision, copied)) == []


def test_a_copy_of_a_model_in_float32_has_nothing_to_be_told_of() -> None:
    model = mlp()
    apply(FLOAT32, model, adam(model))
    assert told(lambda: trained(copy.deepcopy(model))) == []


def test_a_copy_with_a_profile_leaves_others_to_be_told_of() -> None:
    model = mlp()
    precision = apply(BFLOAT16, model, adam(model))
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    assert told(lambda: with_a_profile(precision, one)) == []
    assert len(told(lambda: trained(other))) == 1


def test_nothing_is_left_of_it_when_it_was_told() -> None:
    model = mlp()
    precision = apply(BFLOAT16, model, adam(model))
    assert precision.loop_check is not None
    precision.loop_check.end()
    copied = copy.deepcopy(model)
    told(lambda: trained(copied))
    assert not _global_optimizer_post_hooks
    assert copied.forward.loop_check is None
