"""What else a loop with an Accelerator uses does under a profile what it does without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs
from torch import nn

from autoprec import Policy, Recipe
from autoprec.integrations.accelerate import bind
from tests.integrations.trained import images, loader, momentum, net, recipe_of, reference, relative

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]

BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
LOSS = nn.functional.cross_entropy


def skipping(accelerator: Accelerator, batches: Any) -> Any:
    return accelerator.skip_first_batches(batches, 3)


def all_of_them(accelerator: Accelerator, batches: Any) -> Any:
    return batches


def in_the_model(accelerator: Accelerator, model: Any, inputs: Any, targets: Any) -> Any:
    return LOSS(model(inputs), targets)


def under_autocast(accelerator: Accelerator, model: Any, inputs: Any, targets: Any) -> Any:
    with accelerator.autocast():
        outputs = model(inputs)
        return LOSS(outputs @ torch.full((3, 3), 0.5), targets)


def under_autocast_switched_off(
    accelerator: Accelerator, model: Any, inputs: Any, targets: Any
) -> Any:
    with accelerator.autocast(), accelerator.autocast(AutocastKwargs(enabled=False)):
        outputs = model(inputs)
        return LOSS(outputs @ torch.full((3, 3), 0.5), targets)


def trained(
    recipe: Recipe | None, batches_of: Callable[..., Any], loss_of: Callable[..., Any]
) -> tuple[Any, ...]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=None if recipe else "bf16")
    if recipe is not None:
        bind(accelerator, recipe, watch=False)
    model = net()
    optimizer = momentum(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, schedule, batches = accelerator.prepare(
        model, optimizer, schedule, loader(60, 8)
    )
    losses, rates = [], []
    for inputs, targets in batches_of(accelerator, batches):
        torch.manual_seed(len(losses))
        loss = loss_of(accelerator, model, inputs, targets)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr())
    model.eval()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics((model(x), y)) for x, y in batches]
    outputs = torch.cat([each[0] for each in found])
    return losses, rates, outputs, torch.cat([each[1] for each in found])


@pytest.mark.parametrize("batches_of", [all_of_them, skipping])
@pytest.mark.parametrize("loss_of", [in_the_model, under_autocast, under_autocast_switched_off])
def test_a_loop_trains_as_under_accelerates_own_precision(
    batches_of: Callable[..., Any], loss_of: Callable[..., Any]
) -> None:
    own = trained(None, batches_of, loss_of)
    ours = trained(BFLOAT16, batches_of, loss_of)
    assert ours[0] == own[0] != []
    assert ours[1] == own[1]
    assert torch.equal(ours[2], own[2])
    assert len(ours[2]) == 60
    assert torch.equal(ours[3], own[3])


@pytest.mark.parametrize("is_off", [False, True], ids=["", "switched off"])
@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_FLOAT16])
def test_a_script_that_accumulates_by_itself_divides_its_losses_itself(
    policy: Policy, is_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `accumulate()`, as for accelerate's own setting of one micro-batch."""
    recipe = recipe_of(policy)
    _, expected = reference(recipe_of(Policy.FLOAT32), images(80), epochs=1, dropout=0.0)
    if is_off:
        monkeypatch.setenv("AUTOPREC", "off")
    accelerator = Accelerator(cpu=True)
    precision = bind(accelerator, recipe, watch=False)
    model = net(0.0)
    model, optimizer, batches = accelerator.prepare(
        model, momentum(model.parameters()), loader(80, 8)
    )
    for number, (inputs, targets) in enumerate(batches, 1):
        accelerator.backward(LOSS(model(inputs), targets) / precision.accumulation_steps)
        if number % precision.accumulation_steps == 0:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert relative(model, expected) < (2e-2 if policy.mixed else 1e-5)
