"""The documented training loop: what it computes, when it steps, and how it resumes."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import AutoprecWarning, UsageError
from tests.backends.torch import operated
from tests.backends.torch.operated import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    apply,
    batches,
    mlp,
    same,
    train,
    weights,
)

pytestmark = pytest.mark.torch

RECIPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def hand_written(recipe: Recipe, model: nn.Module, data: list[Any], clip: float) -> None:
    """The loop of PyTorch's AMP recipe."""
    optimizer = adam(model)
    dtype = {"mixed_bfloat16": torch.bfloat16, "mixed_float16": torch.float16}.get(recipe.policy)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=1024.0, enabled=recipe.policy is Policy.MIXED_FLOAT16
    )
    for inputs, targets in data:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = cross_entropy(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", RECIPES)
def test_the_loop_trains_like_the_hand_written_one(name: str) -> None:
    data = batches(6)
    ours, theirs = mlp(), mlp()
    precision = apply(RECIPES[name], ours, adam(ours))
    assert all(train(precision, ours, data, clip=0.1))
    hand_written(RECIPES[name], theirs, data, clip=0.1)
    assert same(weights(ours), weights(theirs))
    assert (precision.steps, precision.skipped) == (6, 0)


def test_a_step_in_float32_makes_no_autocast_and_puts_no_gradient_aside(monkeypatch) -> None:
    model = mlp()
    precision = apply(FLOAT32, model, adam(model))

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a step in float32 asked for it")

    monkeypatch.setattr(torch, "autocast", never)
    monkeypatch.setattr("autoprec.backends.torch.apply.precision.gradients_preserved", never)
    assert all(train(precision, model, batches(2)))


def test_float32_switches_off_an_autocast_that_is_on_around_it() -> None:
    model = mlp()
    precision = apply(FLOAT32, model, adam(model))
    inputs = batches(1)[0][0]
    with torch.autocast("cpu", torch.bfloat16):
        assert model(inputs).dtype is torch.bfloat16
        with precision.autocast():
            assert model(inputs).dtype is torch.float32


def test_an_existing_amp_loop_keeps_its_lines() -> None:
    data = batches(4)
    ours, theirs = mlp(), mlp()
    optimizer = adam(ours)
    precision = apply(FLOAT16, ours, optimizer)
    scaler = precision.scaler
    assert isinstance(scaler, torch.amp.GradScaler)
    for index, (inputs, targets) in enumerate(data):
        optimizer.zero_grad()
        with precision.autocast():
            loss = cross_entropy(ours(inputs), targets) * (1e38 if index == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    hand_written(FLOAT16, theirs, [data[0], *data[2:]], clip=0.1)
    assert same(weights(ours), weights(theirs))
    assert (precision.steps, precision.skipped, scaler.get_scale()) == (3, 1, 512.0)


def test_what_the_recipe_says_can_be_asked() -> None:
    precision = apply(replace(BFLOAT16, batch_size=64, accumulation_steps=2), mlp())
    assert precision.batch_size == 64
    assert precision.accumulation_steps == 2
    assert precision.policy.compute_dtype is DType.BFLOAT16
    assert precision.policy.variable_dtype is DType.FLOAT32
    assert not precision.scaler.is_enabled()


def test_float16_is_never_without_a_loss_scale_and_the_others_never_with_one() -> None:
    assert apply(replace(FLOAT16, loss_scale=None), mlp()).scaler.get_scale() == 2.0**16
    assert not apply(replace(BFLOAT16, loss_scale=LossScale()), mlp()).scaler.is_enabled()


# Overflow and resuming -------------------------------------------------------------------------


def test_planted_overflows_skip_exactly_these_steps_and_halve_the_scale() -> None:
    model = mlp()
    precision = apply(FLOAT16, model, adam(model))
    changed = train(precision, model, batches(6), overflow_at=(1, 4))
    assert changed == [True, False, True, True, False, True]
    assert precision.scaler.get_scale() == 256.0
    assert (precision.steps, precision.skipped, precision.scale_changes) == (4, 2, 2)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit() -> None:
    recipe = operated.float16(initial=256.0, growth_interval=3)
    data = batches(10)
    model = mlp()
    optimizer = adam(model)
    precision = apply(recipe, model, optimizer)
    train(precision, model, data[:5], overflow_at=(1,))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), precision.state_dict()])
    train(precision, model, data[5:], overflow_at=(2,))

    resumed = mlp(seed=7)
    its_optimizer = adam(resumed)
    its_precision = apply(recipe, resumed, its_optimizer)
    for part, state in zip((resumed, its_optimizer, its_precision), saved, strict=True):
        part.load_state_dict(state)
    assert its_precision.state_dict() == saved[2]
    train(its_precision, resumed, data[5:], overflow_at=(2,))
    assert its_precision.state_dict() == precision.state_dict()
    assert same(weights(resumed), weights(model))


def test_states_travel_between_policies_with_and_without_a_scaler() -> None:
    model = mlp()
    scaled = apply(FLOAT16, model, adam(model))
    train(scaled, model, batches(3), overflow_at=(1,))
    plain = apply(BFLOAT16, model, adam(model))
    plain.load_state_dict(scaled.state_dict())
    assert (plain.steps, plain.skipped) == (2, 1)
    assert plain.state_dict()["scaler"] == {}
    again = apply(FLOAT16, model, adam(model))
    again.load_state_dict(plain.state_dict())
    assert again.scaler.get_scale() == 1024.0
    assert again.steps == 2


def test_a_state_of_torchs_own_scaler_loads() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=77)
    precision = apply(FLOAT16, mlp())
    precision.load_state_dict(theirs.state_dict())
    assert precision.scaler.state_dict() == theirs.state_dict()


# Accumulation ----------------------------------------------------------------------------------


def accumulating(recipe: Recipe, steps: int) -> Recipe:
    return replace(recipe, accumulation_steps=steps)


CLEARED = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("how", CLEARED)
def test_gradients_cleared_between_micro_batches_are_noticed(how: str) -> None:
    model = mlp()
    optimizer = adam(model)
    precision = apply(accumulating(FLOAT32, 4), model, optimizer)
    before = weights(model)
    (inputs, targets), *_ = batches(1)
    CLEARED[how](model, optimizer)  # at the top of the first micro-batch it clears nothing
    precision.backward(cross_entropy(model(inputs), targets))
    assert not precision.step()
    CLEARED[how](model, optimizer)
    with pytest.raises(UsageError, match=r"gradients of 1 of 4 .* delete optimizer.zero_grad\(\)"):
        precision.backward(cross_entropy(model(inputs), targets))
    assert same(weights(model), before)


def test_gradients_that_are_clipped_or_zero_by_themselves_are_not_taken_for_cleared() -> None:
    model = mlp()
    precision = apply(accumulating(FLOAT32, 3), model, adam(model))
    for inputs, targets in batches(3):
        precision.backward(cross_entropy(model(inputs), targets))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if precision.on_boundary:
            assert precision.step()
    for inputs, _ in batches(3):
        precision.backward(0 * model(inputs).sum())
        precision.step()


def test_a_schedule_stepped_for_every_micro_batch_is_warned_of_once() -> None:
    model = mlp()
    optimizer = adam(model)
    precision = apply(accumulating(FLOAT32, 2), model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore", UserWarning)  # torch's: stepped before the optimizer
        warnings.simplefilter("always", AutoprecWarning)
        for inputs, targets in batches(8):
            precision.backward(cross_entropy(model(inputs), targets))
            precision.step()
            scheduler.step()
    (warning,) = caught
    assert "between the 2 micro-batches" in str(warning.message)
    assert warning.filename == __file__


def test_a_schedule_stepped_for_every_update_is_not_warned_of() -> None:
    model = mlp()
    optimizer = adam(model)
    precision = apply(accumulating(FLOAT32, 2), model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for inputs, targets in batches(8):
        precision.backward(cross_entropy(model(inputs), targets))
        if precision.step():
            scheduler.step()
    assert scheduler.last_epoch == 4


def test_accumulated_gradients_are_the_mean_over_the_micro_batches() -> None:
    data = batches(4)
    split, whole = mlp(), mlp()
    precision = apply(accumulating(FLOAT32, 4), split, torch.optim.SGD(split.parameters(), lr=1.0))
    assert train(precision, split, data) == [False, False, False, True]
    inputs, targets = (torch.cat(parts) for parts in zip(*data, strict=True))
    unsplit = apply(FLOAT32, whole, torch.optim.SGD(whole.parameters(), lr=1.0))
    train(unsplit, whole, [(inputs, targets)])
    for ours, theirs in zip(weights(split), weights(whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert precision.steps == 1


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_clipping_acts_on_the_boundary_only_and_on_unscaled_gradients(name: str) -> None:
    model = mlp()
    precision = apply(
        accumulating(RECIPES[name], 2), model, torch.optim.SGD(model.parameters(), lr=0.0)
    )
    norms = []
    for inputs, targets in batches(4):
        with precision.autocast():
            loss = cross_entropy(model(inputs), targets)
        precision.backward(loss)
        norms.append(precision.clip_grad_norm_(1e-3))
        if norms[-1] is not None:
            assert precision.clip_grad_norm_(1e-3).item() == pytest.approx(1e-3, rel=1e-3)
            precision.clip_grad_value_(1e-5)
            assert max(p.grad.abs().max() for p in model.parameters()) <= 1e-5
        precision.step()
    assert [norm is None for norm in norms] == [True, False, True, False]
    assert all(norm is None or 0.01 < norm.item() < 10 for norm in norms)


def test_a_second_loss_of_the_same_micro_batch_is_not_counted() -> None:
    model = mlp()
    precision = apply(accumulating(FLOAT32, 2), model, adam(model))
    changed = []
    for inputs, targets in batches(4):
        loss = cross_entropy(model(inputs), targets)
        precision.backward(loss, last=False, retain_graph=True)
        precision.backward(loss)
        changed.append(precision.step())
    assert changed == [False, True, False, True]


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_flush_steps_with_the_mean_over_the_micro_batches_seen(name: str) -> None:
    data = batches(6)
    flushed, exact = mlp(), mlp()
    precision = apply(accumulating(RECIPES[name], 4), flushed, adam(flushed))
    train(precision, flushed, data)
    assert precision.flush()
    assert not precision.flush()
    assert precision.steps == 2
    first = apply(accumulating(RECIPES[name], 4), exact, optimizer := adam(exact))
    train(first, exact, data[:4])
    second = apply(accumulating(RECIPES[name], 2), exact, optimizer)
    train(second, exact, data[4:])
    for ours, theirs in zip(weights(flushed), weights(exact), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_flush_clips_as_the_loop_did() -> None:
    model = mlp()
    before = weights(model)
    precision = apply(accumulating(FLOAT32, 4), model, torch.optim.SGD(model.parameters(), lr=1.0))
    train(precision, model, batches(3), clip=0.01)
    assert same(before, weights(model))
    precision.flush()
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, weights(model), strict=True)])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_flushed_overflow_is_skipped() -> None:
    model = mlp()
    before = weights(model)
    precision = apply(accumulating(FLOAT16, 4), model, adam(model))
    train(precision, model, batches(2), overflow_at=(1,))
    assert not precision.flush()
    assert same(before, weights(model))
    assert precision.skipped == 1
    assert all(p.grad is None for p in model.parameters())


class WithNoSync(nn.Sequential):
    """Remembers which forwards ran inside no_sync, as DistributedDataParallel would read it."""

    inside = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = [*getattr(self, "seen", []), self.inside]
        return super().forward(inputs)


def test_only_the_last_micro_batch_synchronises() -> None:
    model = WithNoSync(nn.Linear(6, 3))
    precision = apply(accumulating(FLOAT32, 3), model, adam(model))
    train(precision, model, batches(6))
    # The very first forward cannot know yet that `backward` will count: it synchronises once more.
    assert model.seen == [False, True, False, True, True, False]


# Several optimizers ----------------------------------------------------------------------------


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


# What cannot be meant ---------------------------------------------------------------------------


def test_clipping_in_a_loop_of_its_own_says_how_instead_of_doing_nothing() -> None:
    model = mlp()
    optimizer = adam(model)
    precision = apply(FLOAT16, model, optimizer)
    precision.scaler.scale(model(torch.ones(2, 6)).float().sum()).backward()
    with pytest.raises(UsageError, match=r"scaler\.unscale_"):
        precision.clip_grad_norm_(1.0)
    with pytest.raises(UsageError, match=r"scaler\.unscale_"):
        precision.clip_grad_value_(1.0)


def test_clipping_without_an_optimizer_is_an_error() -> None:
    model = mlp()
    precision = apply(FLOAT32, model)
    precision.backward(model(torch.ones(2, 6)).sum())
    with pytest.raises(UsageError, match="needs an optimizer"):
        precision.clip_grad_norm_(1.0)


# Losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_losses_that_are_not_finite_are_counted_and_logged(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    precision = apply(RECIPES[name], model, torch.optim.SGD(model.parameters(), lr=0.0))
    with caplog.at_level(logging.WARNING, logger="autoprec"):
        for factor in (1.0, float("inf"), float("nan")):
            precision.backward(model(torch.ones(2, 6)).square().mean() * factor)
            precision.step()
    assert precision.nonfinite_losses == 2
    assert caplog.messages == [
        "step 1: the loss is not finite (1 so far)",
        "step 2: the loss is not finite (2 so far)",
    ]
    assert precision.state_dict()["counts"]["nonfinite_losses"] == 2


def test_the_loss_can_be_computed_in_float32_inside_autocast() -> None:
    precision = apply(BFLOAT16, mlp())
    features = torch.randn(4, 6)

    def contrastive(features: torch.Tensor) -> torch.Tensor:
        return (features @ features.T).logsumexp(-1).mean()

    with precision.autocast():
        assert contrastive(features).dtype is torch.bfloat16
        assert precision.compute_loss(contrastive, features).dtype is torch.float32
        exact = precision.compute_loss(contrastive, features.bfloat16())
        with precision.float32():
            assert (features @ features.T).dtype is torch.float32
    assert torch.equal(exact, contrastive(features.bfloat16().float()))


def test_a_16_bit_loss_is_averaged_in_float32_and_a_float16_one_warned_of() -> None:
    model = nn.Linear(1, 1)
    precision = apply(accumulating(operated.float16(initial=2.0**10), 3), model, adam(model))
    with pytest.warns(AutoprecWarning, match="the loss is float16"):
        precision.backward(model(torch.ones(1, 1)).half().sum())
    assert model.bias.grad is not None
    assert model.bias.grad.item() == pytest.approx(2.0**10 / 3, rel=1e-3)
    precision.backward(model(torch.ones(1, 1)).half().sum())  # said once


def test_float32_turns_an_enclosing_autocast_off() -> None:
    model = mlp()
    precision = apply(FLOAT32, model)
    with torch.autocast("cpu", torch.bfloat16), precision.autocast():
        assert model(torch.ones(2, 6)).dtype is torch.float32


# Mistakes --------------------------------------------------------------------------------------


def test_a_step_without_precisions_backward_is_an_error() -> None:
    model = mlp()
    precision = apply(FLOAT32, model, adam(model))
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(UsageError, match=r"precision\.backward\(loss\) never was"):
        precision.step()


def test_a_step_without_an_optimizer_is_an_error() -> None:
    model = mlp()
    precision = apply(FLOAT32, model)
    precision.backward(model(torch.ones(1, 6)).sum())
    with pytest.raises(UsageError, match="needs an optimizer"):
        precision.step()
    with pytest.raises(UsageError, match="needs an optimizer"):
        precision.flush()
