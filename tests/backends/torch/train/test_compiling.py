"""What is called compiled is compiled: in every trace, and however many models came before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.measure import session as module
from autoprec.backends.torch.measure.session import TorchSession
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.backends.torch.trace.tracer import torch_tracer
from autoprec.backends.torch.train.compiling import NotCompiled, compiled_throughout
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.workers.failures import FailureKind, classify_exception
from tests.backends.torch.operated import BFLOAT16, apply

pytestmark = pytest.mark.torch

RECIPE = replace(BFLOAT16, batch_size=4, compile=True, float32_modules=("0",))


def build() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def data(batch_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(batch_size, 4), torch.randn(batch_size, 1)) for _ in range(4)]


def test_more_models_than_dynamo_bears_are_each_compiled() -> None:
    limit = torch._dynamo.config.recompile_limit
    for _ in range(limit + 2):
        with compiled_throughout(RECIPE):
            model = build()
            precision = apply(RECIPE, model)
            torch._dynamo.utils.counters.clear()
            with precision.autocast():
                model(torch.randn(4, 4))
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_that_dynamo_gives_up_is_an_error_that_refuses_the_recipe() -> None:
    with compiled_throughout(RECIPE):
        for _ in range(torch._dynamo.config.recompile_limit):
            model = build()
            apply(RECIPE, model)
            model(torch.randn(4, 4))
        model = build()
        apply(RECIPE, model)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit) as raised:
            model(torch.randn(4, 4))
    assert classify_exception(raised.value) is FailureKind.UNSUPPORTED


class Counting(nn.Module):
    """Counts its own calls, for each of which Dynamo compiles it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 1), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(inputs) / self.calls


def test_a_session_that_would_time_eager_code_fails_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TorchSurgeon", lambda: TorchSurgeon(compile_backend="eager"))
    task = Task("t", Counting, data, loss_fn=nn.functional.mse_loss)
    compiled = Recipe(batch_size=4, compile=True)
    session = TorchSession(task, compiled, device="cpu", seed=0, report=lambda phase, step: None)
    budget = TimingBudget(seconds=30.0, min_steps=torch._dynamo.config.recompile_limit + 1)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        session.time_steps(budget)
    session.close()
    assert not torch._dynamo.config.fail_on_recompile_limit_hit


def test_a_proof_traces_compiled_code_however_often_it_builds_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo alone stands for the compiler: its limit is met, whatever makes code of its graphs."""
    surgeon = TorchSurgeon(compile_backend="eager")
    monkeypatch.setattr("autoprec.backends.torch.surgeon.TorchSurgeon", lambda: surgeon)
    task = Task("t", build, data, loss_fn=nn.functional.mse_loss)
    tracer = torch_tracer(task, device="cpu", seed=0, report=lambda phase, step: None)
    compiled = Recipe(batch_size=4, compile=True)
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        torch._dynamo.utils.counters.clear()
        tracer.trajectory(recipe=compiled, seed=0, steps=1)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


class LeftAlone(nn.Linear):
    """A model whose author has switched Dynamo off."""

    @torch.compiler.disable
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_of_which_nothing_is_compiled_is_not_called_compiled() -> None:
    task = Task("t", lambda: LeftAlone(4, 1), data, loss_fn=nn.functional.mse_loss)
    with pytest.raises(NotCompiled, match="compiled nothing") as raised:
        TorchSession(
            task, Recipe(batch_size=4, compile=True), device="cpu", seed=0, report=lambda *_: None
        )
    assert classify_exception(raised.value) is FailureKind.UNSUPPORTED
