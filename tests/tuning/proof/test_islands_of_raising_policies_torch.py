"""Islands for policies that raise in the task's own code: found from where it raised; proven."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof

pytestmark = pytest.mark.torch


class ScatteredExperts(nn.Module):
    """Writes the experts' 16-bit results into a float32 tensor by index_add_."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        which = self.router(x).argmax(-1)
        out = torch.zeros(x.shape)
        for number, expert in enumerate(self.experts):
            rows = (which == number).nonzero().squeeze(1)
            out.index_add_(0, rows, expert(x[rows]))
        return x + out


class StrictBackward(torch.autograd.Function):
    """Refuses a 16-bit gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient.dtype is not torch.float32:
            raise TypeError(f"the gradient must be float32, it is {gradient.dtype}")
        return gradient


class Strict(nn.Module):
    def forward(self, x):
        return StrictBackward.apply(x)


class Held(nn.Module):
    """Copies features into a float32 buffer of a fixed size, as a memory bank does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(32, 32))

    def forward(self, x):
        self.bank[torch.arange(len(x))] = x.detach()
        return x


class Complex(nn.Module):
    """Multiplies by complex weights, which no 16-bit number can be made a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, dtype=torch.complex64))

    def forward(self, x):
        return (torch.complex(x, torch.zeros_like(x)) * self.weight).real


class Forces(nn.Module):
    """The gradient of an energy, sample by sample; its norm has a derivative of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1)
        )

    def forward(self, x):
        return torch.func.vmap(torch.func.grad(lambda each: self.energy(each[None]).sum()))(x)


def model_of(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), *middle, nn.Linear(32, 2))


MODELS = {
    "a scatter": (lambda: model_of(ScatteredExperts()), [{"2"}]),
    "a stack of scatters": (
        lambda: model_of(*(ScatteredExperts() for _ in range(4))),
        [set("2345")],
    ),
    "a memory bank": (lambda: model_of(Held()), [{"2"}]),
    "complex weights": (lambda: model_of(Complex()), [{"2"}]),
    "a gradient by vmap": (lambda: model_of(Forces()), [{"2.energy.1"}]),
    # What feeds it decides the dtype of its gradient as well.
    "a backward pass": (lambda: model_of(Strict()), [{"1"}, {"2"}]),
}


def task_of(build: Any) -> Task:
    def build_data(batch_size: int) -> Any:
        for _ in range(100):
            x = torch.randn(batch_size, 8)
            yield x, (x[:, 0] > 0).long()

    return Task(
        "model.py", build_model=build, build_data=build_data, loss_fn=nn.functional.cross_entropy
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_modules_that_raise_are_kept_in_float32_and_no_others(name):
    build, expected = MODELS[name]
    task, recipe = task_of(build), Recipe("mixed_bfloat16", batch_size=16)
    backend = TorchBackend()
    tracer = backend.tracer(task, device="cpu", seed=0, report=lambda *_: None)
    proof = Proof(tracer, steps=8)
    assert "raises" in proof.prove(recipe).reason
    facts = backend.describe(task, device="cpu", seed=0, batch_size=16, report=lambda *_: None)
    found = proof.find_islands(recipe, facts.units)
    assert found.recipe is not None, found.reason
    assert set(found.recipe.float32_modules) in expected
    assert found.verdict.accepted


def test_modules_that_the_user_keeps_in_float32_stay_so():
    task = task_of(MODELS["a scatter"][0])
    backend = TorchBackend()
    tracer = backend.tracer(task, device="cpu", seed=0, report=lambda *_: None)
    facts = backend.describe(task, device="cpu", seed=0, batch_size=16, report=lambda *_: None)
    asked = Recipe("mixed_bfloat16", batch_size=16, float32_modules=("3",))
    found = Proof(tracer, steps=8).find_islands(asked, facts.units)
    assert set(found.recipe.float32_modules) == {"2", "3"}
