"""Checks of a training whose equal blocks Inductor compiles: bit-equal until one intervenes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from autoprec.backends.torch.apply.attached import new_scaler
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.backends.torch.watch.live_islands import islands_of
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning
from benchmarks.numerics.late_breaks import BFLOAT16
from benchmarks.numerics.late_breaks_torch import batches, train
from tests.backends.torch.watch.test_bit_equal import same

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:.*compared with float32"),
]

WIDTH, DEPTH = 16, 4
WHOLE = replace(BFLOAT16, compile=True)
COMPILED = replace(WHOLE, knobs={"compile_scope": "blocks"})


class Block(nn.Module):
    """Sines of its input, times a factor that bfloat16 has no digits for where it is large."""

    def __init__(self, factor: float, dropped: float) -> None:
        super().__init__()
        self.factor = factor
        self.inside, self.outside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropped)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.outside(torch.sin(self.inside(x * self.factor))))


class Stack(nn.Module):
    def __init__(self, factor: float = 1.0, dropped: float = 0.0) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block(factor, dropped) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.leave(x))


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def trained(
    watch: Any, updates: int = 8, recipe: Recipe = COMPILED, **how: float
) -> tuple[Any, ...]:
    """Losses and weights of a training, its graphs, its `Precision` and its model."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Stack(**how)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        precision, losses = train(model, recipe, watch=watch, updates=updates)
    return [losses, dict(model.state_dict()), graphs()], precision, model


def test_checks_leave_compiled_blocks_and_their_training_as_they_are() -> None:
    unwatched, _, _ = trained(False)
    watched, precision, _ = trained("warn")
    assert unwatched[2] == 1
    assert same(watched, unwatched)
    checked = [each for each in precision.watched if each.samples == 8 and not each.not_checked]
    assert len(checked) >= 2, precision.watched
    assert not any(each.problem for each in precision.watched)


@pytest.mark.parametrize("recipe", [COMPILED, WHOLE], ids=["blocks", "whole"])
def test_dropout_that_inductor_draws_is_checked_with_what_eager_code_draws(recipe: Recipe) -> None:
    unwatched, _, _ = trained(False, recipe=recipe, dropped=0.1)
    watched, precision, _ = trained("warn", recipe=recipe, dropped=0.1)
    assert same(watched, unwatched)
    assert len(precision.watched) >= 2
    for each in precision.watched:
        assert (each.samples, each.not_checked, each.problem) == (8, "", "")
        assert each.outputs is not None
        assert 0.0 < each.outputs < 0.05  # as far as bfloat16 rounds: both drew the same


def test_a_fault_beside_compiled_dropout_is_found() -> None:
    with pytest.warns(match="float32"):
        _, precision, _ = trained("warn", updates=14, factor=100.0, dropped=0.1)
    assert any(each.problem for each in precision.watched), precision.watched


def test_compiled_code_that_gives_something_else_each_time_is_not_judged() -> None:
    hidden = iter(range(1, 1000))

    class Foreign(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(hidden)

    torch.compiler.reset()
    with pytest.warns(AutoprecWarning, match="cannot be repeated"):
        precision, _ = train(Foreign(), COMPILED, updates=4, watch="raise")
    assert "cannot be repeated" in precision.watched[0].not_checked
    assert not any(each.problem for each in precision.watched)


def test_what_a_check_keeps_in_float32_runs_so_in_compiled_blocks() -> None:
    with pytest.warns(match="float32"):
        _, precision, model = trained("float32", updates=14, factor=100.0)
    assert any(each.problem for each in precision.watched), precision.watched
    kept = islands_of(model)
    assert any(path.startswith("blocks.") for path in kept)
    inputs, _ = next(batches())
    model.eval()
    with torch.no_grad():
        found = precision.forward(inputs)
        with torch.compiler.set_stance("force_eager"):
            wanted = precision.forward(inputs)
        exact = model(inputs)
    assert (found - exact).norm() < 0.02 * exact.norm(), kept
    assert (found - wanted).norm() < 0.02 * exact.norm(), kept
    precision.restore()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        low = model(inputs)
    assert (low - exact).norm() > 0.1 * exact.norm()  # so they were needed


def test_the_first_update_of_compiled_blocks_is_looked_at_without_a_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def attached(looks: bool) -> tuple[list[float], dict[str, Tensor], int]:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model, surgeon = Stack(), TorchSurgeon()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = COMPILED
        make = surgeon.attach if looks else surgeon.apply
        more = {"whole": model, "scaler": new_scaler(recipe, "cpu")} if looks else {}
        handle = make(recipe, model=model, optimizers=[optimizer], device="cpu", **more)
        losses = []
        data = batches()
        for _ in range(3):
            inputs, targets = next(data)
            with handle.cast() if looks else handle.autocast():
                loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if looks:
            assert handle.ran is not None
            assert handle.ran.compiled
            assert handle.ran.problems(recipe) == ()
            assert not any(module._forward_hooks for module in model.modules())
            assert not any(module._forward_pre_hooks for module in model.modules())
        return losses, dict(model.state_dict()), graphs()

    with caplog.at_level(logging.INFO, "autoprec"):
        found = attached(True)
    assert "compiled, so that its modules are not seen" in caplog.text
    assert found[2] == 1
    assert same(found, attached(False))
