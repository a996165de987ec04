"""What Inductor compiled for a trial is there for the timing and for the proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.measure import session as sessions
from autoprec.backends.torch.measure.session import TorchSession
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.backends.torch.trace.tracer import torch_tracer
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe

# What importing Inductor warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")

POLICIES = [Policy.FLOAT32, Policy.MIXED_BFLOAT16]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(torch.relu(self.first(x)))).squeeze(-1)


def data(batch_size: int) -> Iterator[Any]:
    for _ in range(100):
        x = torch.randn(batch_size, 8)
        yield x, x.sum(-1)


def compiled_anew() -> int:
    """How many graphs Inductor has compiled since the counters were cleared."""
    return int(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"])


def timed(task: Task, recipe: Recipe) -> None:
    """Compile and run a few steps, as every timing begins."""
    TorchSession(task, recipe, device="cpu", seed=0, report=lambda *_: None).close()


def proven(task: Task, recipe: Recipe) -> None:
    """Train as a proof does, after the float32 run that shows whether a step draws numbers."""
    tracer = torch_tracer(task, device="cpu", seed=0, report=lambda *_: None)
    tracer.reference(batch_size=8, steps=2, checkpoints=(0,))
    tracer.trajectory(recipe=recipe, seed=0, steps=2)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_to_be_compiled_is_the_same_each_time(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph, its inputs and how it draws numbers: of these Inductor's cache makes its key."""
    import torch._inductor.config as inductor

    seen: list[Any] = []

    def note(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        given = [(each.shape, each.stride(), each.dtype, each.requires_grad) for each in inputs]
        seen.append((graph.code, given, inductor.fallback_random))
        return graph.forward

    surgeon = TorchSurgeon(compile_backend=note)
    monkeypatch.setattr(sessions, "TorchSurgeon", lambda: surgeon)
    monkeypatch.setattr("autoprec.backends.torch.surgeon.TorchSurgeon", lambda: surgeon)
    task = Task("net.py", Net, data, nn.functional.mse_loss)
    recipe = Recipe(policy, batch_size=8, compile=True)
    timed(task, recipe)
    first = seen.copy()
    for again in (timed, proven):
        seen.clear()
        again(task, recipe)
        assert seen
        assert all(each in first for each in seen)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_session_and_a_training_of_the_proof_compile_nothing_anew(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    task = Task("net.py", Net, data, nn.functional.mse_loss)
    recipe = Recipe(policy, batch_size=8, compile=True)
    seen = []
    for _ in range(2):
        timed(task, recipe)
        seen.append(compiled_anew())
    assert seen[0] > 0
    assert seen[1] == 0
    proven(task, recipe)
    assert compiled_anew() == 0
