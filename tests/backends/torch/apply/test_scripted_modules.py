"""Modules that TorchScript compiled, inside a model: their class has no forward of its own.

All under bfloat16: in one process TorchScript keeps the first 16-bit dtype for every later model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.tuning.proof.recipe_proof import Proof
from tests.backends.torch.operated import BFLOAT16, adam, apply

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(16, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(inputs))


class Written(nn.Module):
    """Writes rows into a float32 tensor."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = torch.zeros([inputs.shape[0], 16])
        out[torch.arange(inputs.shape[0])] = inputs
        return out


def scripted(module: nn.Module) -> Any:
    return torch.jit.script(module)  # type: ignore[no-untyped-call]


def traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, torch.randn(2, 16))  # type: ignore[no-untyped-call]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "within": lambda: nn.Sequential(nn.Linear(6, 16), scripted(Block()), nn.Linear(16, 3)),
    "last": lambda: nn.Sequential(nn.Linear(6, 16), scripted(Block(3))),
    "a sequence": lambda: nn.Sequential(
        nn.Linear(6, 16), scripted(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)))
    ),
    "traced": lambda: nn.Sequential(nn.Linear(6, 16), traced(Block(3))),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("islands", ["none", "the model", "all"])
def test_a_model_with_them_trains_and_is_put_back(name: str, islands: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name](), torch.randn(4, 6)
    every = tuple(path for path, _ in model.named_modules())
    paths = {"none": (), "the model": ("",), "all": every}[islands]
    before = model(inputs)
    precision = apply(replace(BFLOAT16, float32_modules=paths), model, adam(model))
    outputs = precision.forward(inputs)
    assert torch.allclose(outputs, before, atol=0.05)
    assert torch.equal(outputs, before) is (islands == "all")
    assert precision.backward_and_step(outputs.square().mean())
    after = precision.forward(inputs)
    precision.restore()
    assert torch.allclose(model(inputs), after, atol=0.05)
    assert not torch.equal(model(inputs), before)
    assert not any("forward" in module.__dict__ for module in (model, model[0]))


def task_of(build: Callable[[], nn.Module]) -> Task:
    def build_data(batch_size: int) -> Any:
        for _ in range(40):
            inputs = torch.randn(batch_size, 6)
            yield inputs, (inputs[:, 0] > 0).long()

    return Task(
        "model.py", build_model=build, build_data=build_data, loss_fn=nn.functional.cross_entropy
    )


@pytest.mark.parametrize("name", MODELS)
def test_they_are_units_as_a_whole(name: str) -> None:
    facts = TorchBackend().describe(
        task_of(MODELS[name]), device="cpu", seed=0, batch_size=8, report=lambda *_: None
    )
    assert [unit.path for unit in facts.units] == (
        ["0", "1", "2"] if name == "within" else list("01")
    )
    assert sum(unit.products for unit in facts.units) == pytest.approx(1.0)


def test_one_that_raises_is_kept_in_float32() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), scripted(Written()), nn.Linear(16, 2))

    backend, task = TorchBackend(), task_of(build)
    facts = backend.describe(task, device="cpu", seed=0, batch_size=8, report=lambda *_: None)
    tracer = backend.tracer(task, device="cpu", seed=0, report=lambda *_: None)
    found = Proof(tracer, steps=8).find_islands(replace(BFLOAT16, batch_size=8), facts.units)
    assert found.recipe is not None, found.reason
    assert found.recipe.float32_modules == ("2",)


@pytest.mark.parametrize("made", [scripted, traced])
def test_another_model_that_is_scripted_gives_float32_beside_the_model(made: Any) -> None:
    """A teacher, or an average of the weights, as it was saved by TorchScript."""
    model, inputs = Block(3), torch.randn(4, 16)
    teacher = made(copy.deepcopy(model))
    precision = apply(BFLOAT16, model)
    for _ in range(2):
        with precision.autocast():
            found = [teacher(inputs), model(inputs), teacher(inputs)]
        assert [each.dtype for each in found] == [torch.float32] * 3
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
    assert not teacher._forward_hooks
