"""Copies of an optimizer train the copy of the model as the one that was given trains the model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from autoprec.backends.torch.capture.master_copy import MasterCopy
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError
from tests.backends.torch.capture.captured import Net, net, optimizer_of
from tests.backends.torch.operated import BFLOAT16, FLOAT32, apply

pytestmark = pytest.mark.torch


def grouped(model: Net) -> torch.optim.Optimizer:
    """A frozen layer, and groups of different rates."""
    model.first.requires_grad_(requires_grad=False)
    return torch.optim.SGD(
        [
            {"params": [model.last.weight], "lr": 0.5, "weight_decay": 0.0},
            {"params": [model.last.bias, *model.norm.parameters()]},
        ],
        lr=0.01,
        momentum=0.9,
        weight_decay=0.1,
    )


def test_groups_keep_their_parameters_rates_and_decay() -> None:
    model = net()
    master = MasterCopy("task", model, grouped(model))
    copied = master.build_model()
    optimizer = master.build_optimizer(copied)
    names = {id(parameter): path for path, parameter in copied.named_parameters()}
    found = [
        ([names[id(p)] for p in group["params"]], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert found == [
        (["last.weight"], 0.5, 0.0),
        (["last.bias", "norm.weight", "norm.bias"], 0.01, 0.1),
    ]
    assert [path for path, p in copied.named_parameters() if not p.requires_grad] == [
        "first.weight",
        "first.bias",
    ]
    assert type(optimizer) is torch.optim.SGD


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
            self.other.weight = self.one.weight

    model = Tied()
    master = MasterCopy("task", model, optimizer_of(model))
    copied = master.build_model()
    assert copied.other.weight is copied.one.weight
    assert master.build_optimizer(copied).param_groups[0]["params"][0] is copied.one.weight


def test_what_an_optimizer_keeps_of_its_parameters_goes_along() -> None:
    model = net()
    optimizer = optimizer_of(model)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    master = MasterCopy("task", model, optimizer)
    copied = master.build_model()
    state = master.build_optimizer(copied).state[copied.last.weight]
    assert torch.equal(state["exp_avg"], optimizer.state[model.last.weight]["exp_avg"])
    assert state["exp_avg"] is not optimizer.state[model.last.weight]["exp_avg"]


def test_a_schedules_step_is_not_taken_along_and_its_rate_is_that_after_the_warm_up() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, epoch / 10))
    assert optimizer.param_groups[0]["lr"] == 0.0
    master = MasterCopy("task", model, optimizer)
    copied = master.build_model()
    built = master.build_optimizer(copied)
    assert built.param_groups[0]["lr"] == 0.1
    before = copied.last.weight.detach().clone()
    copied(torch.randn(4, 6)).sum().backward()
    built.step()
    assert not torch.equal(before, copied.last.weight)
    assert torch.equal(before, model.last.weight)


def test_a_schedule_that_rises_is_at_its_peak() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=10)
    master = MasterCopy("task", model, optimizer)
    assert master.build_optimizer(master.build_model()).param_groups[0]["lr"] == 0.4


def test_a_compiled_model_is_the_one_inside() -> None:
    model = net()
    optimizer = optimizer_of(model)
    master = MasterCopy("task", torch.compile(model, backend="eager"), optimizer)
    assert type(master.build_model()) is Net


@pytest.mark.parametrize("recipe", [BFLOAT16, replace(FLOAT32, memory_format="channels_last")])
def test_a_model_with_a_profile_is_refused_until_that_is_undone(recipe: Recipe) -> None:
    """Plain float32 would be measured in the profile's layout, and compared with itself."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.ones(1, 3, 8, 8))
    optimizer = optimizer_of(model)
    precision = apply(recipe, model, optimizer)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(UsageError, match=r"a profile is applied .* precision\.restore\(\)"):
            MasterCopy("task", each, optimizer)
    precision.restore()
    copied = MasterCopy("task", model, optimizer).build_model()
    assert "forward" not in vars(copied)
    assert copied[0].weight.is_contiguous()  # type: ignore[index, operator]
