"""The proof of float8: what it breaks is caught, and what passes is not oversold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends.protocol import Task, Tracer
from autoprec.backends.torch.backend import TorchBackend
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.single_step import check_single_steps
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

WIDTH = 32
BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16, batch_size=16, compile=True)
FLOAT8 = Recipe(Policy.MIXED_BFLOAT16, batch_size=16, compile=True, knobs={"float8": True})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take narrow layers for wide ones, and Dynamo alone for the compiler."""
    monkeypatch.setattr("autoprec.core.speed.float8.SMALLEST_WIDTH", WIDTH)
    surgeon = TorchSurgeon(compile_backend="eager")
    monkeypatch.setattr("autoprec.backends.torch.surgeon.TorchSurgeon", lambda: surgeon)


class Net(nn.Module):
    """Two hidden layers; rows of the second are as large as `spread` says, and scaled back."""

    spread = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.other, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        rows = torch.exp2(torch.linspace(0, -self.spread, WIDTH))
        self.rows: Tensor
        self.register_buffer("rows", rows)
        with torch.no_grad():
            self.hidden.weight.mul_(rows.unsqueeze(-1))
        self.hidden.weight.requires_grad_(not self.spread)  # such rows need other learning rates

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(self.first(x).relu()) / self.rows
        found: Tensor = self.last(self.other(x.relu()).relu())
        return found.squeeze(-1)


class Uneven(Net):
    """What one scale has to hold spreads over more magnitudes than e4m3 has."""

    spread = 40


def data(batch_size: int) -> Iterator[Any]:
    for _ in range(40):
        x = torch.randn(batch_size, 8)
        yield x, x.sum(-1)


def tracer(model: type[Net]) -> Tracer:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    task = Task("net.py", model, data, nn.functional.mse_loss, build_optimizer=optimizer)
    return TorchBackend().tracer(task, device="cpu", seed=0, report=lambda *_: None)


def prove(model: type[Net], recipe: Recipe, steps: int) -> Verdict:
    return Proof(tracer(model), steps=steps).prove(recipe)


@pytest.mark.parametrize(("model", "passes"), [(Net, True), (Uneven, False)])
def test_a_single_step_shows_rows_that_one_scale_cannot_hold(
    model: type[Net], passes: bool
) -> None:
    traced = tracer(model)
    traced.reference(batch_size=16, steps=1, checkpoints=(0,))
    check = check_single_steps(
        traced.compare_steps(recipe=FLOAT8), traced.noise(draws=3), Tolerance()
    )
    assert check.passed is passes, check


@pytest.mark.slow
def test_weights_of_very_different_rows_under_one_scale_are_caught() -> None:
    assert prove(Uneven, BFLOAT16, 30).verdict == "equal"
    verdict = prove(Uneven, FLOAT8, 30)
    assert verdict.verdict in ("drift", "rejected"), verdict.reason


@pytest.mark.slow
def test_two_hidden_layers_train_like_float32_and_it_is_said_how_little_that_shows() -> None:
    verdict = prove(Net, FLOAT8, 120)
    assert verdict.verdict == "equal", verdict.reason
    assert verdict.steps == verdict.most_steps == 120
    assert "in float8, 120 steps show gross failures only: compare a longer " in verdict.reason
    plain = prove(Net, BFLOAT16, 120)
    assert plain.verdict == "equal"
    assert "gross failures" not in plain.reason
