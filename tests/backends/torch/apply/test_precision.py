"""The documented training loop: what it computes, when it steps, and how it resumes."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autoprec.backends.torch.apply import loop_checks
from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import AutoprecWarning, UsageError
from tests.backends.torch import operated
from tests.backends.torch.operated import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    RECIPES,
    accumulating,
    adam,
    apply,
    batches,
    mlp,
    same,
    train,
    weights,
)

pytestmark = pytest.mark.torch


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
    monkeypatch.setattr("autoprec.backends.torch.apply.accumulation.gradients_preserved", never)
    assert all(train(precision, model, batches(2)))


@pytest.mark.parametrize("name", RECIPES)
def test_after_the_first_steps_none_goes_through_the_modules(name: str, monkeypatch) -> None:
    """A model has hundreds, and a step of a small one takes as long as going through them."""
    model = mlp()
    precision = apply(RECIPES[name], model, adam(model))
    assert all(train(precision, model, batches(loop_checks.STEPS), clip=0.1))

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a step went through the model's modules")

    monkeypatch.setattr(nn.Module, "named_modules", never)
    assert all(train(precision, model, batches(2), clip=0.1))


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
    assert (precision.steps, precision.skipped, precision.counts.scale_drops) == (4, 2, 2)


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
