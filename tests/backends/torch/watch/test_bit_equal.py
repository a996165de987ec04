"""A training with checks is the training without them, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec import Recipe
from autoprec.core.recipe import LossScale
from benchmarks.numerics.late_breaks import BFLOAT16, FLOAT16
from benchmarks.numerics.late_breaks_torch import train

pytestmark = pytest.mark.torch


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 2))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def spectral_norm() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 2)
    )


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.rest, self.reentrant = nn.Linear(8, 16), dropout_block(), reentrant

    def forward(self, given: torch.Tensor) -> Any:
        return checkpoint(self.rest, self.first(given), use_reentrant=self.reentrant)


def dropout_block() -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))


class Counting(nn.Module):
    """Keeps state in plain attributes, a list and Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.average, self.calls = nn.Linear(8, 2), torch.zeros(2), 0
        self.seen: list[torch.Tensor] = []

    def forward(self, given: torch.Tensor) -> Any:
        self.calls += 1
        result = self.inside(given) * random.uniform(0.9, 1.1) + 0.01 * self.average
        self.average = 0.9 * self.average + 0.1 * result.detach().float().mean(0)
        self.seen.append(self.average)
        return result


class SetByData(nn.Module):
    """Sets its weights by the first batch, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.end = nn.Linear(8, 16), nn.Linear(16, 2)
        self.shift, self.scale = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.ones(16))
        self.register_buffer("is_set", torch.tensor(False))
        self.is_set: torch.Tensor

    def forward(self, given: torch.Tensor) -> Any:
        hidden = self.inside(given)
        if not self.is_set:
            self.shift.data.copy_(-hidden.float().mean(0))
            self.scale.data.copy_(1 / (hidden.float().std(0) + 1e-6))
            self.is_set.fill_(True)
        return self.end((hidden + self.shift) * self.scale)


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.end = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, given: torch.Tensor) -> Any:
        return self.end(self.inside(given.reshape(8, 4, 2))[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "dropout": dropout,
    "batch_norm": batch_norm,
    "spectral_norm": spectral_norm,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant_checkpoint": lambda: Checkpointed(True),
    "counting": Counting,
    "set_by_data": SetByData,
    "rnn": Rnn,
}
ACCUMULATED = replace(BFLOAT16, accumulation_steps=3)
SKIPPING = replace(FLOAT16, loss_scale=LossScale(mode="dynamic", initial=2.0**40))


def result_of(
    make: Callable[[], nn.Module], recipe: Recipe, watch: Any, **more: Any
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    random.seed(0)
    model = make()
    precision, losses = train(model, recipe, watch=watch, **more)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    held = {
        k: copy.deepcopy(v) for k, v in vars(model).items() if k in ("calls", "average", "seen")
    }
    drawn = torch.rand(3), random.random()
    return losses, state, held, drawn, precision.counts, precision


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("recipe", [BFLOAT16, ACCUMULATED, FLOAT16, SKIPPING])
@pytest.mark.parametrize("name", MODELS)
def test_a_watched_training_is_the_unwatched_one(name: str, recipe: Recipe) -> None:
    *watched, precision = result_of(MODELS[name], recipe, "warn")
    *unwatched, _ = result_of(MODELS[name], recipe, False)
    assert same(watched, unwatched)
    checked = [each for each in precision.watched if each.samples == 8 and not each.not_checked]
    assert len(checked) >= 2, precision.watched
    assert not any(each.problem for each in precision.watched)


def test_nothing_of_a_check_is_left_on_model_and_optimizer() -> None:
    torch.manual_seed(0)
    model = plain()
    before = set(vars(model))
    precision, _ = train(model, BFLOAT16, updates=4, every=100)
    assert set(vars(model)) - before == {"forward"}
    precision.restore()
    assert set(vars(model)) == before
    assert not precision.optimizers[0]._optimizer_step_pre_hooks
    assert not precision.optimizers[0]._optimizer_step_post_hooks


def test_hooks_of_the_users_own_see_the_training_alone() -> None:
    torch.manual_seed(0)
    model = plain()
    features: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, given, result: features.append(result.detach()))
    model[0].weight.register_hook(gradients.append)
    precision, _ = train(model, BFLOAT16, updates=7, every=1)
    assert len(precision.watched) == 7
    assert len(features) == len(gradients) == 7


def test_a_compiled_model_is_compiled_once() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    results = []
    for watch in (False, "warn"):
        torch._dynamo.reset()
        compiled.clear()
        torch.manual_seed(0)
        model = dropout()
        whole = torch.compile(model, backend=backend)
        precision, losses = train(whole, BFLOAT16, updates=8, watch=watch)
        results.append((losses, len(compiled), model.state_dict()))
    assert len(precision.watched) >= 3
    assert not any(each.problem or each.not_checked for each in precision.watched)
    assert same(results[0], results[1])
