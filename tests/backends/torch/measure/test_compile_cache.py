"""What Inductor compiled for a trial is there for the timing and for the proof."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.measure.session import TorchSession
from autoprec.backends.torch.trace.tracer import torch_tracer
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe

pytestmark = [
    pytest.mark.slow,
    # What importing Inductor warns of.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]


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


@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_BFLOAT16])
def test_a_second_session_and_a_training_of_the_proof_compile_nothing_anew(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    task = Task("net.py", Net, data, nn.functional.mse_loss)
    recipe = Recipe(policy, batch_size=8, compile=True)
    seen = []
    for _ in range(2):
        session = TorchSession(task, recipe, device="cpu", seed=0, report=lambda *_: None)
        seen.append(compiled_anew())
        session.close()
    assert seen[0] > 0
    assert seen[1] == 0
    tracer = torch_tracer(task, device="cpu", seed=0, report=lambda *_: None)
    tracer.reference(batch_size=8, steps=2, checkpoints=(0,))
    tracer.trajectory(recipe=recipe, seed=0, steps=2)
    assert compiled_anew() == 0
