"""A loop that does not do what its profile needs is told so once, after its first steps."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
)

from autoprec.backends.torch.apply import noticed_steps
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning
from tests.backends.torch.operated import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    accumulating,
    adam,
    apply,
    batches,
    mlp,
)

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _no_other_steps_are_noticed() -> None:
    """Models of other tests may be alive still."""
    for check in list(noticed_steps._NOTICING):
        check.end()


Loop = Callable[[Any, nn.Module, torch.optim.Optimizer], None]


def plain(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The loop as it was before `apply_profile`."""
    for inputs, targets in batches(6):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def with_autocast(dtype: torch.dtype, **scaler: Any) -> Loop:
    """The loop of torch's own AMP."""

    def loop(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        own = torch.amp.GradScaler("cpu", **(scaler or {"enabled": False}))
        for inputs, targets in batches(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                outputs = model(inputs)
            own.scale(cross_entropy(outputs.float(), targets)).backward()
            own.step(optimizer)
            own.update()

    return loop


def forward_alone(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, targets in batches(6):
        optimizer.zero_grad()
        cross_entropy(precision.forward(inputs), targets).backward()
        optimizer.step()


def backward_alone(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, targets in batches(6):
        precision.backward(cross_entropy(precision.forward(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def evaluated_first(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        precision.forward(batches(1)[0][0])
    plain(precision, model, optimizer)


def told(loop: Loop, recipe: Recipe, *, given: bool = True) -> list[str]:
    """What a loop is warned of, over two runs of it, where the profile was given its optimizer."""
    model = mlp()
    optimizer = adam(model)
    precision = apply(recipe, model, *([optimizer] if given else []))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(precision, model, optimizer)
        loop(precision, model, optimizer)
    assert all(each.filename == __file__ for each in caught), caught
    assert all(issubclass(each.category, AutoprecWarning) for each in caught)
    assert not _global_optimizer_post_hooks
    assert not model._forward_pre_hooks
    assert "zero_grad" not in vars(model) | vars(optimizer)
    return [str(each.message) for each in caught]


LINES = r"precision\.forward\(inputs\), targets\)\n.*precision\.backward_and_step\(loss\)"


@pytest.mark.parametrize(
    ("loop", "recipe", "said"),
    [
        (plain, BFLOAT16, "runs in float32 and not in mixed_bfloat16"),
        (evaluated_first, BFLOAT16, "runs in float32 and not in mixed_bfloat16"),
        (plain, FLOAT16, "runs in float32 and not in mixed_float16.*the loss is not scaled"),
        (plain, accumulating(FLOAT32, 4), "where the profile accumulates 4"),
        (forward_alone, accumulating(BFLOAT16, 2), "where the profile accumulates 2"),
        (forward_alone, FLOAT16, "the loss is not scaled"),
        (backward_alone, FLOAT16, "gradients stay multiplied by it"),
        (with_autocast(torch.float16), BFLOAT16, "autocast in float16 .* which is mixed_bfloat16"),
        (with_autocast(torch.bfloat16), FLOAT32, "autocast in bfloat16 .* which is float32"),
        (with_autocast(torch.float16, init_scale=8.0), FLOAT16, "scale and floor are the profile"),
        (with_autocast(torch.bfloat16, init_scale=8.0), BFLOAT16, "needs no loss scale"),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_what_was_seen_and_what_to_write_is_said_once(
    loop: Loop, recipe: Any, said: str, given: bool
) -> None:
    (text,) = told(loop, recipe, given=given)
    assert re.search(said, text, re.S), text
    assert re.search(LINES, text, re.S), text
    assert ("give apply_profile the optimizer" in text) is not given


def test_optimizers_of_other_models_are_none_of_its_own() -> None:
    model, other = mlp(), mlp()
    precision = apply(BFLOAT16, model)
    plain(precision, other, adam(other))
    assert _global_optimizer_post_hooks
    assert not model._forward_pre_hooks
    with pytest.warns(AutoprecWarning, match="runs in float32 and not in mixed_bfloat16"):
        plain(precision, model, adam(model))
    assert not _global_optimizer_post_hooks


def test_another_optimizer_than_the_one_that_was_given_is_watched_as_well() -> None:
    model = mlp()
    precision = apply(BFLOAT16, model, adam(model))
    with pytest.warns(AutoprecWarning, match="runs in float32 and not in mixed_bfloat16"):
        plain(precision, model, adam(model))


def test_hooks_of_the_loop_s_own_are_all_called() -> None:
    called = []
    models = [mlp(), mlp()]
    for model in models:
        apply(BFLOAT16, model)
    own = register_optimizer_step_post_hook(lambda *_: called.append(1))
    for model in models:
        with pytest.warns(AutoprecWarning):
            plain(None, model, adam(model))
    assert len(called) == 12
    own.remove()
    optimizer = adam(models[0])
    plain(None, models[0], optimizer)
    assert not _global_optimizer_post_hooks


def test_nothing_is_left_where_the_model_is_gone_before_it_is_trained() -> None:
    apply(BFLOAT16, mlp())
    gc.collect()
    other = mlp()
    plain(None, other, adam(other))
    assert not _global_optimizer_post_hooks


def short(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, targets in batches(6):
        precision.backward_and_step(cross_entropy(precision.forward(inputs), targets))


def scalers_lines(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for index, (inputs, targets) in enumerate(batches(8), start=1):
        with precision.autocast():
            loss = cross_entropy(model(inputs), targets) / precision.accumulation_steps
        precision.scaler.scale(loss).backward()
        if index % precision.accumulation_steps == 0:
            precision.scaler.step(optimizer)
            precision.scaler.update()
            optimizer.zero_grad()


def accumulated_by_hand(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for index, (inputs, targets) in enumerate(batches(8), start=1):
        loss = cross_entropy(precision.forward(inputs), targets) / precision.accumulation_steps
        loss.backward()
        if index % precision.accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def parts_called(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, targets in batches(6):
        with precision.autocast():
            outputs = model[2](model[1](model[0](inputs)))
        precision.backward_and_step(precision.compute_loss(cross_entropy, outputs, targets))


@pytest.mark.parametrize(
    ("loop", "recipe"),
    [
        (short, FLOAT32),
        (short, BFLOAT16),
        (short, FLOAT16),
        (backward_alone, BFLOAT16),
        (short, accumulating(FLOAT16, 2)),
        (plain, FLOAT32),
        (forward_alone, BFLOAT16),
        (with_autocast(torch.bfloat16), BFLOAT16),
        (scalers_lines, FLOAT16),
        (scalers_lines, accumulating(BFLOAT16, 2)),
        (accumulated_by_hand, accumulating(BFLOAT16, 2)),
        (parts_called, BFLOAT16),
    ],
)
def test_a_loop_that_does_it_is_told_nothing(loop: Loop, recipe: Any) -> None:
    assert told(loop, recipe) == []


@pytest.mark.parametrize("loop", [scalers_lines, forward_alone])
def test_such_a_loop_may_keep_its_optimizer_to_itself(loop: Loop) -> None:
    assert told(loop, FLOAT16 if loop is scalers_lines else BFLOAT16, given=False) == []


def test_what_is_switched_off_is_not_watched() -> None:
    model = mlp()
    optimizer = adam(model)
    precision = TorchSurgeon().leave_unchanged(
        accumulating(FLOAT32, 2), model=model, optimizers=[optimizer]
    )
    plain(precision, model, optimizer)
    assert not _global_optimizer_post_hooks


# zero_grad() of the loop's own -------------------------------------------------------------------


def clears(whose: str, at: str, *, to_none: bool = True) -> Loop:
    def loop(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        owner = {"optimizer": optimizer, "model": model}[whose]
        for inputs, targets in batches(6):
            if at == "top":
                owner.zero_grad(set_to_none=to_none)
            precision.backward_and_step(cross_entropy(precision.forward(inputs), targets))
            if at == "end":
                owner.zero_grad(set_to_none=to_none)

    return loop


@pytest.mark.parametrize("recipe", [FLOAT32, BFLOAT16, FLOAT16])
@pytest.mark.parametrize("whose", ["optimizer", "model"])
@pytest.mark.parametrize("at", ["top", "end"])
def test_a_zero_grad_of_the_loops_own_is_said_under_every_profile(
    whose: str, at: str, recipe: Any
) -> None:
    (text,) = told(clears(whose, at, to_none=at == "top"), recipe)
    assert "precision.step(), which clears the gradients itself: delete it" in text


def test_a_zero_grad_before_training_is_nothing_to_say() -> None:
    def once(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if precision.steps == 0:
            model.zero_grad()
        short(precision, model, optimizer)

    assert told(once, FLOAT32) == []


def test_gradients_are_cleared_as_before() -> None:
    model = mlp()
    optimizer = adam(model)
    apply(FLOAT32, model, optimizer)
    for owner in (model, optimizer):
        model(torch.ones(1, 6)).sum().backward()
        owner.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in model.parameters())


# Modules that came in later ----------------------------------------------------------------------


def with_a_new_head(precision: Any, model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[2] = nn.Linear(10, 3)
    short(precision, model, optimizer)


def with_a_new_forward(precision: Any, model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.forward = lambda inputs: model[2](model[1](model[0](inputs)))
    short(precision, model, optimizer)


def test_what_took_the_place_of_a_module_in_float32_is_named() -> None:
    kept = replace(BFLOAT16, float32_modules=("2",))
    (text,) = told(with_a_new_head, kept)
    assert text.startswith("2 came into the model after apply_profile, which keeps what was there")
    (text,) = told(with_a_new_forward, kept)
    assert text.startswith("the model's forward came into the model after apply_profile")
    assert told(with_a_new_head, replace(BFLOAT16, float32_modules=("0",))) == []
    assert told(with_a_new_head, FLOAT32) == []


def test_a_model_that_was_moved_to_another_kind_of_device_is_named() -> None:
    def moved(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.to("meta")
        for _ in range(4):
            with precision.autocast():
                model(torch.ones(1, 6, device="meta"))
            optimizer.step()

    (text,) = told(moved, BFLOAT16)
    assert text.startswith("the model came to meta after apply_profile, which knew it on cpu")
    assert "call apply_profile again" in text


@pytest.mark.parametrize("recipe", [FLOAT32, BFLOAT16, FLOAT16])
def test_weights_that_were_cast_afterwards_are_named(recipe: Recipe) -> None:
    def cast(precision: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.bfloat16()
        for inputs, targets in batches(4):
            with precision.autocast():
                outputs = model(inputs.bfloat16())
            precision.backward(cross_entropy(outputs.float(), targets))
            precision.step()

    (text,) = told(cast, recipe)
    assert text.startswith("the weights became bfloat16 after apply_profile")
    assert f"{recipe.policy} keeps them in float32" in text


def test_hooks_on_parameters_are_told_of_the_loss_scale() -> None:
    def clamped(precision: Any, model: Any, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        short(precision, model, optimizer)

    (text,) = told(clamped, FLOAT16)
    assert text.startswith("the hook on 0.weight gets its gradient multiplied by the loss scale")
    assert told(clamped, BFLOAT16) == []


# What is left of the watch -----------------------------------------------------------------------


def test_a_copy_of_a_watched_model_is_a_model_of_its_own() -> None:
    model = mlp()
    optimizer = adam(model)
    precision = apply(BFLOAT16, model, optimizer)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model(torch.ones(1, 6)).sum().backward()
        copied(torch.ones(1, 6)).sum().backward()
        copied.zero_grad()
        assert all(p.grad is None for p in copied.parameters())
        assert all(p.grad is not None for p in model.parameters())
        assert not copied._forward_pre_hooks
    copy.deepcopy(optimizer).zero_grad()
    assert all(p.grad is not None for p in model.parameters())
    precision.restore()


@pytest.mark.parametrize("ends", ["restore", "apply again"])
def test_a_profile_that_is_undone_or_replaced_watches_no_longer(ends: str) -> None:
    model = mlp()
    optimizer = adam(model)
    precision = apply(BFLOAT16, model, optimizer)
    if ends == "restore":
        precision.restore()
        assert not _global_optimizer_post_hooks
        assert not model._forward_pre_hooks
        assert "zero_grad" not in vars(model) | vars(optimizer)
    else:
        apply(FLOAT32, model, optimizer)
    plain(precision, model, optimizer)


def test_a_compiled_model_is_watched_without_a_hook_of_its_own() -> None:
    torch._dynamo.reset()
    model = mlp()
    optimizer = adam(model)
    precision = apply(replace(BFLOAT16, compile=True), model, optimizer)
    assert not model._forward_pre_hooks
    with pytest.warns(AutoprecWarning, match="runs in float32 and not in mixed_bfloat16"):
        plain(precision, model, optimizer)
