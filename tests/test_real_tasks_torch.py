"""Training code as libraries and papers have it, trained by recipes that change one thing each.

Each row is a file in `real_tasks`, trained in the documented loop beside the same loop in plain
torch.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from real_task_rows_torch import ROWS, STEPS, by_hand, load, one_thread, recipe_of, task
from training_loops_torch import applied, batches, start

from autoprec import Policy, Recipe, apply_profile
from autoprec.backends.torch.apply.float32_islands import NEVER_CALLED
from autoprec.core.recipe import Alignment, LossScale

__all__ = ["one_thread", "task"]

pytestmark = [
    pytest.mark.slow,
    # PEFT asks transformers by the name of before its version 5.16.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def accumulated(recipe: Recipe) -> Recipe:
    return replace(recipe, batch_size=recipe.batch_size // 2, accumulation_steps=2)


@pytest.mark.parametrize("parts", [1, 2])
def test_float32_trains_exactly_as_the_plain_loop_does(task: ModuleType, parts: int) -> None:
    recipe = recipe_of(task) if parts == 1 else accumulated(recipe_of(task))
    ours, theirs = applied(task, recipe, STEPS), by_hand(task, recipe)
    assert ours.losses == theirs.losses
    assert same_state(ours.model, theirs.state)
    assert ours.precision.skipped == 0


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("policy", [Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16])
def test_a_mixed_policy_trains_as_plain_autocast_does(
    task: ModuleType, policy: Policy, parts: int
) -> None:
    scale = LossScale(initial=256.0) if policy.needs_loss_scale else None
    recipe = recipe_of(task, policy, loss_scale=scale)
    recipe = recipe if parts == 1 else accumulated(recipe)
    ours, theirs = applied(task, recipe, STEPS), by_hand(task, recipe)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)
    assert ours.precision.skipped == 0
    float32 = by_hand(task, replace(recipe, policy=Policy.FLOAT32, loss_scale=None))
    assert ours.losses != float32.losses
    assert ours.losses == pytest.approx(float32.losses, rel=0.02)


# The physics row's step differentiates outside any module, where autocast still reaches it.
@pytest.mark.parametrize("task", [row for row in ROWS if row != "physics"], indirect=True)
def test_with_every_module_an_island_a_mixed_policy_is_float32(task: ModuleType) -> None:
    recipe = recipe_of(task, Policy.MIXED_BFLOAT16, float32_modules=modules_of(task))
    ours, theirs = applied(task, recipe, STEPS), by_hand(task, recipe_of(task))
    assert ours.losses == theirs.losses
    assert same_state(ours.model, theirs.state)


CHANGES = {
    "channels_last": {"memory_format": "channels_last"},
    "fused": {"knobs": {"fused_optimizer": True}},
}


@pytest.mark.parametrize("name", [*CHANGES, "padded"])
def test_what_a_recipe_changes_besides_leaves_the_losses(task: ModuleType, name: str) -> None:
    changes = CHANGES.get(name) or {"alignment": Alignment(24, modules_of(task))}
    recipe = recipe_of(task, **changes)
    ours, theirs = applied(task, recipe, STEPS), by_hand(task, recipe_of(task))
    assert name != "padded" or ours.precision.report.padded
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)


def test_an_average_of_the_weights_follows_and_predicts_under_the_policy() -> None:
    task = load("diffusion")
    recipe = recipe_of(task, Policy.MIXED_BFLOAT16, float32_modules=("up", "up.norm"))
    model, optimizers = start(task)
    precision = apply_profile(recipe, model=model, optimizer=list(optimizers))
    average = task.build_average(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    data = batches(task, recipe, STEPS)
    for batch in data:
        with precision.autocast():
            loss = task.training_step(model, batch)
        precision.backward(loss)
        assert precision.step()
        average.update_parameters(model)
        first = average.n_averaged == 1
        for name, value in model.state_dict().items():
            expected[name] = value.clone() if first else 0.9 * expected[name] + 0.1 * value
    for name, value in average.module.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    inputs = data[0][0]
    plain_model, _ = start(task)
    plain_model.load_state_dict(average.module.state_dict())
    with torch.no_grad(), precision.autocast():
        found = average(inputs["noisy"], inputs["steps"])
    with torch.no_grad():
        exact = plain_model(inputs["noisy"], inputs["steps"])
    assert found.dtype is torch.float32
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)


def modules_of(task: ModuleType) -> tuple[str, ...]:
    """Every module that is called, of a task's model."""
    found = start(task)[0].named_modules()
    return tuple(name for name, module in found if not isinstance(module, NEVER_CALLED))


def same_state(ours: torch.nn.Module, there: dict[str, torch.Tensor]) -> bool:
    """Whether a model holds this state, under the same names."""
    here = ours.state_dict()
    return list(here) == list(there) and all(torch.equal(here[name], there[name]) for name in here)
