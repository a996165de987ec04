"""Two optimizers under one loss scale: each gradient is unscaled once, by the scale it was made at.

Trainers update the scale after each optimizer's step, where torch wants it after all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from autoprec import Policy, Recipe
from autoprec.core.recipe import LossScale
from autoprec.integrations.accelerate import bind
from autoprec.integrations.lightning import fabric_plugin, plugin
from tests.integrations.lightning_modules import fabric_of, pytorch_of, trainer_of
from tests.integrations.trained import images, loader, net

pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state", "without_tensorflow"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]

GROWS = LossScale(initial=1024.0, growth_interval=2)
FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=GROWS)
LOSS = nn.functional.cross_entropy
UPDATES = 4


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """One for each half of the model."""
    halves = [model.conv, model.norm, model.exact], [model.layer_norm, model.wide, model.head]
    return [
        torch.optim.SGD([p for part in half for p in part.parameters()], lr=0.1) for half in halves
    ]


def plain(clips: bool) -> Any:
    model = net(0.0)
    made = optimizers(model)
    for inputs, targets in loader(8 * UPDATES, 8):
        LOSS(model(inputs), targets).backward()
        for each in made:
            if clips:
                nn.utils.clip_grad_norm_([p for g in each.param_groups for p in g["params"]], 0.5)
        for each in made:
            each.step()
            each.zero_grad()
    return model


def with_fabric(clips: bool) -> tuple[Any, Any]:
    made = fabric_plugin(FLOAT16, package="lightning", watch=False)
    fabric = fabric_of("lightning").Fabric(accelerator="cpu", devices=1, plugins=[made])
    model = net(0.0)
    module, *both = fabric.setup(model, *optimizers(model))
    for inputs, targets in loader(8 * UPDATES, 8):
        fabric.backward(LOSS(module(inputs), targets))
        for each in both if clips else ():
            made.unscale_gradients(each.optimizer)
            nn.utils.clip_grad_norm_([p for g in each.param_groups for p in g["params"]], 0.5)
        for each in both:
            each.step()
        for each in both:
            each.zero_grad()
    return model, made.loop


def with_accelerate(clips: bool) -> tuple[Any, Any]:
    accelerator = Accelerator(cpu=True)
    precision = bind(accelerator, FLOAT16, watch=False)
    model = net(0.0)
    model, *both = accelerator.prepare(model, *optimizers(model))
    for inputs, targets in loader(8 * UPDATES, 8):
        accelerator.backward(LOSS(model(inputs), targets))
        for each in both if clips else ():
            parameters = [p for group in each.param_groups for p in group["params"]]
            accelerator.clip_grad_norm_(parameters, 0.5)
        for each in both:
            each.step()
        for each in both:
            each.zero_grad()
    return model, precision


def with_lightning(clips: bool) -> tuple[Any, Any]:
    """By manual optimization, the only way to several optimizers."""

    class Lit(pytorch_of("lightning").LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = net(0.0), False

        def training_step(self, batch: Any, index: int) -> None:
            both = self.optimizers()
            self.manual_backward(LOSS(self.net(batch[0]), batch[1]))
            for each in both if clips else ():
                self.clip_gradients(each, 0.5, "norm")
            for each in both:
                each.step()
            for each in both:
                each.zero_grad()

        def configure_optimizers(self) -> Any:
            return optimizers(self.net)

    made = plugin(FLOAT16, package="lightning", watch=False)
    lit = Lit()
    trainer_of("lightning", made, max_epochs=1, gradient_clip_val=None).fit(
        lit, loader(8 * UPDATES, 8)
    )
    return lit.net, made.loop


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("training", [with_fabric, with_accelerate, with_lightning])
def test_each_gradient_is_unscaled_once_by_the_scale_it_was_made_at(
    training: Callable[[bool], tuple[Any, Any]], clips: bool
) -> None:
    model, loop = training(clips)
    start, expected = net(0.0).state_dict(), plain(clips).state_dict()
    for name, _ in model.named_parameters():
        moved = model.state_dict()[name] - start[name]
        wanted = expected[name] - start[name]
        if name != "conv.bias":  # the norm behind it takes it away
            assert float((moved - wanted).norm() / wanted.norm()) < 0.2, name
    assert loop.scaler.get_scale() == 1024.0 * 2 ** (UPDATES // 2)


def prepared_by_accelerate(recipe: Recipe, model: nn.Module) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True)
    loop = bind(accelerator, recipe, watch=False)
    return accelerator.backward, loop, *accelerator.prepare(model, *optimizers(model))


def prepared_by_fabric(recipe: Recipe, model: nn.Module) -> tuple[Any, ...]:
    made = fabric_plugin(recipe, package="lightning", watch=False)
    fabric = fabric_of("lightning").Fabric(accelerator="cpu", devices=1, plugins=[made])
    return fabric.backward, made.loop, *fabric.setup(model, *optimizers(model))


PREPARED = [prepared_by_accelerate, prepared_by_fabric]


@pytest.mark.parametrize("prepared", PREPARED)
def test_an_overflow_in_one_half_is_an_overflow_of_the_update(
    prepared: Callable[..., tuple[Any, ...]],
) -> None:
    raw = net(0.0)
    backward, loop, model, first, second = prepared(FLOAT16, raw)
    handle = raw.conv.bias.register_hook(lambda grad: torch.full_like(grad, torch.inf))
    inputs, targets = images(8)
    before = {name: value.clone() for name, value in raw.state_dict().items()}
    backward(LOSS(model(inputs), targets))
    handle.remove()
    first.step()
    assert loop.scaler.get_scale() == 1024.0
    second.step()
    assert loop.scaler.get_scale() == 512.0
    assert torch.equal(raw.conv.weight, before["conv.weight"])
    moved = (raw.head.weight.detach() - before["head.weight"]).norm()
    again = net(0.0)
    LOSS(again(inputs), targets).backward()
    assert float(moved) == pytest.approx(0.1 * float(again.head.weight.grad.norm()), rel=0.02)


@pytest.mark.parametrize("prepared", PREPARED)
def test_a_scale_that_grows_with_every_update_grows_once(
    prepared: Callable[..., tuple[Any, ...]],
) -> None:
    scale = LossScale(initial=64.0, growth_interval=1)
    raw = net(0.0)
    backward, loop, model, *both = prepared(replace(FLOAT16, loss_scale=scale), raw)
    inputs, targets = images(8)
    for update in range(1, 4):
        backward(LOSS(model(inputs), targets))
        for each in both:
            each.step()
        for each in both:
            each.zero_grad()
        assert loop.scaler.get_scale() == 64.0 * 2**update
        assert loop.steps == update


@pytest.mark.parametrize("prepared", PREPARED)
def test_parameters_without_an_optimizer_leave_the_scale_to_the_others(
    prepared: Callable[..., tuple[Any, ...]],
) -> None:
    """Their gradients are there all the same, and nothing ever steps with them."""
    scale = LossScale(initial=64.0, growth_interval=1)
    raw = net(0.0)
    backward, loop, model, _, second = prepared(replace(FLOAT16, loss_scale=scale), raw)
    inputs, targets = images(8)
    for _ in range(3):
        backward(LOSS(model(inputs), targets))
        second.step()
        second.zero_grad()
    backward(LOSS(model(inputs), targets))
    assert loop.steps == 3
    assert loop.scaler.get_scale() == 64.0 * 2**3
