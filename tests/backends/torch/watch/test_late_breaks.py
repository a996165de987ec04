"""Trainings that break late are told of and mended; healthy ones are left alone."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Recipe
from autoprec.errors import AutoprecError, AutoprecWarning
from benchmarks.numerics.late_breaks import BFLOAT16, FLOAT16, FLOAT32, QUICK, RECIPES, Pace
from benchmarks.numerics.late_breaks_torch import Frequency, LogitScale, batches, train, trained

pytestmark = pytest.mark.torch


def broken(name: str, watch: str, updates: int = 56) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        precision, _ = trained(name, RECIPES[name], QUICK, watch=watch, every=4, updates=updates)
    return precision, [str(each.message) for each in said if "updates in" in str(each.message)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_late_break_is_told_and_its_modules_are_named(name: str) -> None:
    precision, said = broken(name, "warn")
    assert not precision.watched[0].problem, "healthy at first"
    assert any(each.action == "warn" for each in precision.watched), precision.watched
    assert "from float32's" in said[0] or "float32's are" in said[0]
    assert "float32" in said[0]


@pytest.mark.parametrize("name", RECIPES)
def test_modules_in_float32_mend_it(name: str) -> None:
    precision, said = broken(name, "float32")
    acted = [i for i, each in enumerate(precision.watched) if each.action]
    assert acted
    assert "is kept in float32" in said[0]
    after = precision.watched[acted[-1] + 1 :]
    assert len(after) >= 2
    assert not any(each.problem for each in after), precision.watched


@pytest.mark.parametrize("seed", range(3))
def test_scores_that_grow_in_bfloat16_train_as_in_float32(seed: int) -> None:
    """So noise may excuse what a check finds there: the docs say that it does."""

    def ends_at(recipe: Recipe) -> float:
        torch.manual_seed(seed)
        model = LogitScale(Pace(1.1, 0, 1))
        model.limit = 1000.0
        _, losses = train(model, recipe, watch=False, updates=250, at_update=model.grow)
        return sum(losses[-100:])

    assert ends_at(BFLOAT16) < 1.1 * ends_at(FLOAT32)


def test_it_can_raise() -> None:
    with pytest.raises(AutoprecError, match=r"after .* updates in mixed_bfloat16 .* outputs are"):
        broken("frequency", "raise")


def test_what_mends_is_few_modules_and_goes_on_in_a_checkpoint() -> None:
    precision, _ = broken("frequency", "float32")
    state = precision.state_dict()
    kept = state["watch"]["float32_modules"]
    assert kept
    assert "last" not in kept
    torch.manual_seed(0)
    model = Frequency()
    model.load_state_dict({"size": torch.tensor(300.0)}, strict=False)
    other, _ = train(model, BFLOAT16, watch="float32", updates=1)
    other.load_state_dict(state)
    assert other.state_dict()["watch"] == state["watch"]
    assert other.watched == precision.watched


class Attention(nn.Module):
    """A block of a transformer, whose key's bias has no gradient but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.last = nn.Linear(8, 2)

    def forward(self, given: torch.Tensor) -> Any:
        return self.last(self.inside(given.reshape(2, 4, 8)).reshape(8, 8))


def mlp(act: Callable[[], nn.Module], *, norm: bool = False, drop: float = 0.0) -> nn.Module:
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(8, 16), *middle, act(), nn.Dropout(drop), nn.Linear(16, 2))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
        self.last = nn.Linear(24, 2)

    def forward(self, given: torch.Tensor) -> Any:
        return self.last(self.inside(given.unsqueeze(1)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.last = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, given: torch.Tensor) -> Any:
        return self.last(self.inside(given.reshape(8, 4, 2))[0][:, -1])


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: mlp(nn.ReLU),
    "gelu": lambda: mlp(nn.GELU),
    "dropout": lambda: mlp(nn.ReLU, drop=0.3),
    "batch norm": lambda: mlp(nn.ReLU, norm=True),
    "attention": Attention,
    "convolution": Convolved,
    "recurrent": Recurrent,
}


def alike() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one batch again and again: the loss falls far."""
    batch = next(batches())
    while True:
        yield batch


def healthy() -> Iterator[Any]:
    """Yield every model with either data in either policy: one of nine every day, else in CI."""
    cases = itertools.product(HEALTHY, (batches, alike), (BFLOAT16, FLOAT16))
    for index, case in enumerate(cases):
        yield pytest.param(*case, marks=[] if index % 9 == 0 else pytest.mark.zoo)


@pytest.mark.parametrize(("name", "data", "recipe"), [*healthy()])
def test_a_healthy_training_raises_nothing(
    name: str, data: Callable[[], Iterator[Any]], recipe: Recipe
) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoprecWarning)
        precision, losses = train(
            HEALTHY[name](), recipe, watch="raise", every=10, updates=150, data=data()
        )
    assert losses[-1] < losses[0]
    assert len(precision.watched) >= 15
    assert not any(each.action or each.not_checked for each in precision.watched)
