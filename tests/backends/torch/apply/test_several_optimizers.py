"""Several optimizers under one Precision: a GAN's, and those that share parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError
from tests.backends.torch import operated
from tests.backends.torch.operated import (
    FLOAT32,
    RECIPES,
    adam,
    apply,
    batches,
    mlp,
    train,
    weights,
)

pytestmark = pytest.mark.torch


def test_several_optimizers_step_together_and_the_scale_updates_once() -> None:
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[2].parameters(), lr=0.1)
    before = weights(model)
    recipe = operated.float16(initial=256.0, growth_interval=2)
    precision = apply(recipe, model, first, second)
    assert train(precision, model, batches(2), clip=1.0) == [True, True]
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert precision.scaler.get_scale() == 512.0
    assert all(p.grad is None for p in model.parameters())


def test_parameters_shared_by_optimizers_are_clipped_once() -> None:
    model = nn.Linear(2, 1)
    one, two = (torch.optim.SGD(model.parameters(), lr=0.0) for _ in range(2))
    precision = apply(FLOAT32, model, one, two)
    precision.backward(model(torch.ones(1, 2)).sum())
    norm = precision.clip_grad_norm_(10.0)
    assert norm is not None
    assert norm.item() == pytest.approx(3**0.5)


class Gan(nn.Module):
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, part: str, inputs: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(part)(inputs)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (self.discriminator, self.generator)
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]


def against_ones(logits: torch.Tensor, real: bool) -> torch.Tensor:
    targets = torch.full_like(logits, float(real))
    return nn.functional.binary_cross_entropy_with_logits(logits, targets)


def noise_of(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def gan_losses(model: Gan, autocast: Any, step: int, real: torch.Tensor) -> Iterator[torch.Tensor]:
    """The discriminator's loss, and after its step the generator's."""
    with autocast():
        fake = model("generator", noise_of(step))
        judged = model("discriminator", real), model("discriminator", fake.detach())
    yield against_ones(judged[0].float(), True) + against_ones(judged[1].float(), False)
    with autocast():
        judged_again = model("discriminator", fake)
    yield against_ones(judged_again.float(), True)


def train_gan_by_hand(model: Gan, recipe: Recipe, count: int) -> list[torch.Tensor]:
    """The loop of torch's own AMP examples: two optimizers, one scaler, updated once."""
    first, second = model.optimizers()
    dtype = {"mixed_bfloat16": torch.bfloat16, "mixed_float16": torch.float16}.get(recipe.policy)
    scaler = torch.amp.GradScaler("cpu", enabled=recipe.policy.needs_loss_scale, init_scale=256.0)
    parts = recipe.accumulation_steps
    for step, (real, _) in enumerate(batches(count)):

        def autocast() -> Any:
            return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)

        own = [list(model.discriminator.parameters()), list(model.generator.parameters())]
        losses = gan_losses(model, autocast, step, real)
        for optimizer, parameters, loss in zip((first, second), own, losses, strict=True):
            scaler.scale(loss / parts).backward(inputs=parameters)
            if (step + 1) % parts == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                scaler.step(optimizer)
                optimizer.zero_grad()
        if (step + 1) % parts == 0:
            scaler.update()
    return weights(model)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_gan_steps_each_optimizer_by_itself_as_the_hand_written_loop_does(
    name: str, parts: int
) -> None:
    recipe = operated.float16(initial=256.0) if name == "float16" else RECIPES[name]
    recipe = replace(recipe, accumulation_steps=parts)
    model = Gan()
    first, second = model.optimizers()
    precision = apply(recipe, model, first, second)
    changed = []
    for step, (real, _) in enumerate(batches(6)):
        losses = gan_losses(model, precision.autocast, step, real)
        for optimizer, loss in zip((first, second), losses, strict=True):
            precision.backward(loss, optimizer=optimizer)
            precision.clip_grad_norm_(1.0, optimizer=optimizer)
            changed.append(precision.step(optimizer=optimizer))
    assert changed == ([True] * 12 if parts == 1 else [False, False, True, True] * 3)
    for ours, theirs in zip(weights(model), train_gan_by_hand(Gan(), recipe, 6), strict=True):
        assert torch.equal(ours, theirs)


def test_one_optimizers_step_leaves_the_others_weights_and_gradients() -> None:
    model = Gan()
    first, second = model.optimizers()
    precision = apply(operated.float16(initial=256.0), model, first, second)
    before = weights(model.discriminator)
    judged = model("discriminator", model("generator", noise_of(0))).float()
    precision.backward(against_ones(judged, True), optimizer=second)
    assert all(p.grad is None for p in model.discriminator.parameters())
    assert precision.step(optimizer=second)
    assert all(map(torch.equal, before, weights(model.discriminator)))


class Checkpointed(Gan):
    """A GAN whose parts are computed again in the backward pass."""

    reentrant = True

    def forward(self, part: str, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs if inputs.requires_grad else inputs.clone().requires_grad_()
        return checkpoint(self.get_submodule(part), inputs, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_parts_that_are_computed_again_have_one_optimizers_gradients_too(reentrant: bool) -> None:
    model, plain = Checkpointed(), Gan()
    model.reentrant = reentrant
    first, second = model.optimizers()
    precision = apply(FLOAT32, model, first, second)
    for step, (real, _) in enumerate(batches(3)):
        losses = gan_losses(model, precision.autocast, step, real)
        for optimizer, loss in zip((first, second), losses, strict=True):
            precision.backward(loss, optimizer=optimizer)
            assert precision.clip_grad_norm_(1.0, optimizer=optimizer)
            assert precision.step(optimizer)
    for ours, theirs in zip(weights(model), train_gan_by_hand(plain, FLOAT32, 3), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_that_the_other_optimizer_has_so_far_are_kept() -> None:
    model = Gan()
    first, second = model.optimizers()
    precision = apply(replace(FLOAT32, accumulation_steps=2), model, first, second)
    losses = gan_losses(model, precision.autocast, 0, batches(1)[0][0])
    precision.backward(next(losses), optimizer=first)
    before = [p.grad.clone() for p in model.discriminator.parameters() if p.grad is not None]
    precision.backward(next(losses), optimizer=second)
    after = [p.grad for p in model.discriminator.parameters() if p.grad is not None]
    assert len(before) == len(after) == 4
    assert all(map(torch.equal, before, after))


def test_the_scale_changes_only_when_nobody_holds_gradients_at_the_old_one() -> None:
    model = Gan()
    first, second = model.optimizers()
    recipe = operated.float16(initial=256.0, growth_interval=1)
    precision = apply(recipe, model, first, second)
    for optimizer, loss in zip(
        (first, second), gan_losses(model, precision.autocast, 0, batches(1)[0][0]), strict=True
    ):
        precision.backward(loss, optimizer=optimizer)
    assert precision.step(optimizer=first)
    assert precision.scaler.get_scale() == 256.0
    assert precision.step(optimizer=second)
    assert precision.scaler.get_scale() == 512.0


def test_an_optimizer_cannot_step_twice_while_another_holds_gradients_at_the_old_scale() -> None:
    model = Gan()
    first, second = model.optimizers()
    precision = apply(operated.float16(initial=256.0), model, first, second)
    real = batches(1)[0][0]
    for optimizer, loss in zip(
        (first, second), gan_losses(model, precision.autocast, 0, real), strict=True
    ):
        precision.backward(loss, optimizer=optimizer)
    assert precision.step(optimizer=first)
    precision.backward(next(gan_losses(model, precision.autocast, 1, real)), optimizer=first)
    with pytest.raises(UsageError, match="steps for the second time while another one holds"):
        precision.step(optimizer=first)


def test_a_partial_accumulation_is_flushed_for_one_optimizer_alone() -> None:
    model = Gan()
    first, second = model.optimizers()
    precision = apply(replace(FLOAT32, accumulation_steps=4), model, first, second)
    real = batches(1)[0][0]
    for optimizer, loss in zip(
        (first, second), gan_losses(model, precision.autocast, 0, real), strict=True
    ):
        precision.backward(loss, optimizer=optimizer)
    assert not precision.step(optimizer=first)
    kept = weights(model.generator)
    assert precision.flush(optimizer=first)
    assert all(map(torch.equal, kept, weights(model.generator)))
    assert not precision.flush(optimizer=first)
    assert precision.flush()


def test_an_optimizer_that_was_not_given_is_an_error() -> None:
    model = mlp()
    precision = apply(FLOAT32, model, adam(model))
    with pytest.raises(UsageError, match="expected one of the optimizers"):
        precision.backward(model(torch.ones(2, 6)).sum(), optimizer=adam(model))
