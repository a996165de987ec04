"""Blocks that Inductor compiles one by one train as eager code does, whatever a recipe does too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from autoprec.backends.protocol import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.backends.torch.trace.random_numbers import drawn_alike_compiled
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Alignment, Recipe
from autoprec.tuning.proof.recipe_proof import Proof
from tests.backends.torch.distributed.joined import on_two_ranks
from tests.backends.torch.operated import apply

#: A C++ compiler makes code of every graph. What importing Inductor and torch.compile warn of.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.release,
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]

WIDTH, DEPTH = 12, 5
BY_BLOCK = {"compile_scope": "blocks"}
COMPILED = Recipe(Policy.MIXED_BFLOAT16, batch_size=8, compile=True, knobs=BY_BLOCK)


class Block(nn.Module):
    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropped)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.relu(self.one(x)))


class Stack(nn.Module):
    """Blocks between two layers; `repeats` says how their activations are made again, if so."""

    def __init__(
        self, make: Callable[[], nn.Module] = Block, repeats: bool | None = None, depth: int = DEPTH
    ) -> None:
        super().__init__()
        images = make is Convolutions
        self.enter = nn.Conv2d(3, 8, 3) if images else nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        self.leave = nn.Linear(8 if images else WIDTH, 1)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            if self.repeats is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.repeats)
        return torch.as_tensor(self.leave(x.mean((-1, -2)) if x.dim() == 4 else x))


def stack(*given: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(*given)


def inputs_of(model: Stack, count: int, rank: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shape = (8, 6) if isinstance(model.enter, nn.Linear) else (8, 3, 10, 10)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


@dataclass
class Trained:
    """Losses and weights of a training, what was skipped of the recipe, and how many graphs."""

    losses: list[float]
    weights: dict[str, Tensor]
    skipped: list[str] = field(default_factory=list)
    graphs: int = 0


def train(recipe: Recipe, model: Stack, *, updates: int = 3, rank: int = 0) -> Trained:
    """Train under a recipe, and undo it; Dynamo may not give up."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    parallel = torch.distributed.is_initialized()
    called: nn.Module = DistributedDataParallel(model) if parallel else model
    names, parameters = list(model.state_dict()), list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    precision = apply(recipe, called, optimizer, compile_backend="inductor")
    losses = []
    torch.manual_seed(7)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for inputs in inputs_of(model, updates * recipe.accumulation_steps, rank):
            loss = (precision.forward(inputs).sum(-1) - inputs.flatten(1).mean(-1)).square().mean()
            precision.backward_and_step(loss)
            losses.append(loss.item())
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    skipped = [each.reason for each in precision.report.skipped]
    precision.restore()
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(module._compiled_call_impl is None for module in model.modules())
    return Trained(losses, model.state_dict(), skipped, graphs)


def check_equal(compiled: Trained, eager: Trained, policy: Policy) -> None:
    """Kernels round at other places: in bfloat16 by its digits."""
    far = 2e-2 if policy.mixed else 1e-4
    torch.testing.assert_close(compiled.losses, eager.losses, rtol=far, atol=far)
    for name, weight in eager.weights.items():
        torch.testing.assert_close(compiled.weights[name], weight, rtol=far, atol=far, msg=name)


PADDED = {"alignment": Alignment(8, tuple(f"blocks.{n}.up" for n in range(DEPTH)))}
ISLANDS = {"float32_modules": tuple(f"blocks.{n}.norm" for n in range(DEPTH))}
AS_A_WHOLE = ["islands, padding or float8 in its blocks would compile every block anew; it is"]

CASES: dict[str, tuple[Recipe, tuple[Any, ...], int]] = {
    "float32": (replace(COMPILED, policy=Policy.FLOAT32), (), 1),
    "bfloat16": (COMPILED, (), 1),
    "accumulation": (replace(COMPILED, accumulation_steps=2), (), 1),
    "channels_last": (replace(COMPILED, memory_format="channels_last"), (Convolutions,), 1),
    "dropout": (COMPILED, (lambda: Block(0.3),), 1),
    "checkpoints": (COMPILED, (lambda: Block(0.3), False), 1),
    "reentrant checkpoints": (COMPILED, (lambda: Block(0.3), True), 2),
    "islands": (replace(COMPILED, **ISLANDS), (), 1),
    "padded": (replace(COMPILED, **PADDED), (), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_compiled_blocks_train_as_eager_ones(name: str) -> None:
    recipe, model, graphs = CASES[name]
    eager = train(replace(recipe, compile=False, knobs={}), stack(*model))
    with drawn_alike_compiled() if "drop" in name or "check" in name else nullcontext():
        compiled = train(recipe, stack(*model))
    whole = name in ("islands", "padded")
    assert [why[:77] for why in compiled.skipped] == [why[:77] for why in AS_A_WHOLE * whole]
    assert compiled.graphs == graphs
    check_equal(compiled, eager, recipe.policy)


def data(batch_size: int) -> Iterator[Any]:
    for _ in range(40):
        x = torch.randn(batch_size, 6)
        yield x, x.sum(-1, keepdim=True)


def test_the_proof_of_compiled_blocks_with_dropout_passes() -> None:
    task = Task("stack.py", lambda: Stack(lambda: Block(0.1)), data, nn.functional.mse_loss)
    tracer = TorchBackend().tracer(task, device="cpu", seed=0, report=lambda *_: None)
    verdict = Proof(tracer, steps=30).prove(COMPILED)
    assert verdict.verdict == "equal", verdict.reason


def on_a_rank(rank: int) -> dict[str, Any]:
    eager = replace(COMPILED, compile=False, knobs={})
    return {
        "compiled": train(COMPILED, stack(), rank=rank),
        "eager": train(eager, stack(), rank=rank),
    }


@pytest.mark.scale
def test_two_ranks_with_compiled_blocks_train_as_with_eager_ones(tmp_path: Path) -> None:
    first, second = on_two_ranks(on_a_rank, tmp_path)
    assert first["compiled"].graphs == second["compiled"].graphs == 1
    assert first["compiled"].losses != second["compiled"].losses
    for name, weight in first["compiled"].weights.items():
        assert torch.equal(weight, second["compiled"].weights[name])
    for found in (first, second):
        check_equal(found["compiled"], found["eager"], COMPILED.policy)
