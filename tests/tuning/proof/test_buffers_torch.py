"""Buffers that only evaluation reads: what a precision does to them shows in the verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof

pytestmark = pytest.mark.torch

BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16, 32)
NAMED = "adds up numbers rounded to 16 bits"


def silent(phase: str, step: int) -> None:
    pass


def data(batch_size: int) -> Any:
    centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
    for _ in range(40):
        y = torch.randint(4, (batch_size,))
        yield centres[y] + 0.7 * torch.randn(batch_size, 16), y


class Counting(nn.Module):
    """A classifier that keeps something of its features; they are far from zero."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        nn.init.constant_(self.body[2].bias, 10.0)
        self.head = nn.Linear(8, 4)
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=name != "moment")

    def forward(self, x: torch.Tensor) -> Any:
        features = self.body(x)
        if self.training:
            with torch.no_grad():
                self.keep(features)
        return self.head(features - 10.0)

    def keep(self, features: torch.Tensor) -> None:
        pass


class Squares(Counting):
    """Adds up squares of 16-bit features: evaluation takes their mean's square off."""

    def __init__(self) -> None:
        super().__init__(squares=torch.zeros(8), count=torch.zeros(()))

    def keep(self, features: torch.Tensor) -> None:
        self.squares += features.square().sum(0)
        self.count += len(features)


class Moment(Counting):
    """Averages a squared norm over steps, in a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__(moment=torch.zeros(8))

    def keep(self, features: torch.Tensor) -> None:
        self.moment.lerp_(features.square().mean(0).to(self.moment.dtype), 0.05)


class Variance(Counting):
    """Takes a variance by E[x^2] - E[x]^2, in 16 bits."""

    def __init__(self) -> None:
        super().__init__(spread=torch.ones(8))

    def keep(self, features: torch.Tensor) -> None:
        found = features.square().mean(0) - features.mean(0).square()
        self.spread.lerp_(found.to(self.spread.dtype), 0.1)


class Frozen(Variance):
    """Keeps it in a parameter that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        del self.spread
        self.spread = nn.Parameter(torch.ones(8), requires_grad=False)


class LongSum(Counting):
    """Keeps its sum in the dtype of what it adds: beyond 256 addends nothing is added any more."""

    def __init__(self) -> None:
        super().__init__(total=torch.zeros(8))

    def keep(self, features: torch.Tensor) -> None:
        self.total = self.total.to(features.dtype) + features.mean(0)


class Normalised(Counting):
    """Batch normalisation, twice, of centred numbers, too; and a range observer."""

    def __init__(self) -> None:
        super().__init__(largest=torch.zeros(8))
        self.body = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8, bias=False), nn.BatchNorm1d(8)
        )

    def keep(self, features: torch.Tensor) -> None:
        self.largest = torch.maximum(self.largest, features.amax(0))


class Codebook(Counting):
    """Moving averages of a codebook, as quantisers keep them in float32."""

    def __init__(self) -> None:
        super().__init__(codes=10.0 + torch.randn(6, 8), sizes=torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def keep(self, features: torch.Tensor) -> None:
        features = features.float()
        hot = nn.functional.one_hot(torch.cdist(features, self.codes).argmin(1), 6).float()
        with torch.autocast("cpu", enabled=False):
            self.sizes.lerp_(hot.sum(0), 0.1)
            self.sums.lerp_(hot.T @ features, 0.1)
        self.codes.copy_(self.sums / (self.sizes[:, None] + 1e-3))


def task(model: type[nn.Module]) -> Task:
    return Task(
        "task.py",
        model,
        data,
        loss_fn=nn.functional.cross_entropy,
        build_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def proof(model: type[nn.Module]) -> Proof:
    tracer = TorchBackend().tracer(task(model), device="cpu", seed=0, report=silent)
    return Proof(tracer, steps=30)


def proven(model: type[nn.Module]) -> Verdict:
    return proof(model).prove(BFLOAT16)


@pytest.mark.parametrize(("model", "buffer"), [(Squares, "squares"), (Moment, "moment")])
def test_a_buffer_that_adds_up_rounded_numbers_is_named(model, buffer):
    verdict = proven(model)
    assert verdict.accepted
    assert f"the buffer {buffer} {NAMED}" in verdict.reason
    assert buffer in verdict.buffers
    assert "what these steps leave in the model's buffers" in verdict.covered


@pytest.mark.parametrize(
    ("model", "buffer"), [(Variance, "spread"), (Frozen, "spread"), (LongSum, "total")]
)
def test_a_buffer_that_is_wrong_is_drift_and_named(model, buffer):
    verdict = proven(model)
    assert verdict.verdict == "drift"
    assert f"the buffer {buffer} " in verdict.reason


@pytest.mark.parametrize("model", [Normalised, Codebook, Counting])
def test_statistics_that_are_kept_well_are_equal(model):
    verdict = proven(model)
    assert verdict.accepted
    judged = "what these steps leave in the model's buffers" in verdict.covered
    assert judged is (model is not Counting)
    if model is Normalised:
        assert verdict.buffers == ""


def test_float32_modules_repair_a_buffer_as_they_repair_a_loss():
    facts = TorchBackend().describe(
        task(Variance), device="cpu", seed=0, batch_size=32, report=silent
    )
    found = proof(Variance).find_islands(BFLOAT16, facts.units)
    assert found.recipe is not None
    assert found.verdict.accepted
    assert found.recipe.float32_modules
