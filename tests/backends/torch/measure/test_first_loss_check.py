"""A first loss that no training can begin with is the user's error, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.measure.first_loss_check import check_first_loss
from autoprec.errors import TaskError

Batch = tuple[torch.Tensor, torch.Tensor]


def pairs(batch_size: int) -> Iterator[Batch]:
    while True:
        yield torch.randn(batch_size, 4), torch.randn(batch_size, 1)


class Logarithm(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.abs() - inputs.abs()).log()


def model(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 1))


def check(net: nn.Module, batch: Any, **changes: Any) -> str:
    """The error's text; none is a failure."""
    known = {} if changes else {"loss_fn": F.mse_loss}
    task = Task("task.py", lambda: net, pairs, **known, **changes)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(TaskError) as raised:
        check_first_loss(task, net, batch, 0)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    return str(raised.value)


def with_nan(sample: int = 3) -> Batch:
    inputs, targets = next(pairs(8))
    inputs[sample, 1] = torch.nan
    return inputs, targets


def test_a_good_first_loss_passes_and_leaves_no_trace() -> None:
    net = model(nn.BatchNorm1d(8))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    check_first_loss(Task("task.py", lambda: net, pairs, F.mse_loss), net, next(pairs(8)), 0)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_nan_in_the_data_is_named_with_its_sample() -> None:
    said = check(model(), with_nan())
    assert "the loss of the first batch is nan" in said
    assert "1 of 32 numbers that are inf or NaN in inputs, first in sample 3" in said
    inputs, targets = next(pairs(8))
    targets[5] = torch.inf
    assert "in targets, first in sample 5" in check(model(), (inputs, targets))


def test_nan_in_a_batch_of_any_form_is_named_with_its_key() -> None:
    def step(net: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(net(batch["features"][0]), batch["wanted"])

    inputs, targets = with_nan(2)
    said = check(model(), {"features": [inputs], "wanted": targets}, training_step=step)
    assert "in batch['features'][0], first in sample 2" in said


def test_a_module_that_makes_inf_is_named() -> None:
    said = check(model(Logarithm()), next(pairs(8)))
    assert "its inputs are finite, and 1 (Logarithm) is the first module" in said


def test_a_loss_that_makes_inf_is_named() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs * 0).log().mean()

    said = check(model(), next(pairs(8)), loss_fn=loss)
    assert "every module's outputs are finite, so loss_fn makes it" in said


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda out, y: (out - out).mean(), "moves no weight"),
        (lambda out, y: (0 * out).sqrt().mean(), "its gradient by 1.bias is inf or NaN"),
    ],
)
def test_a_gradient_that_moves_nothing_or_everything_to_nan_is_an_error(
    loss: Callable[..., torch.Tensor], said: str
) -> None:
    net = model()
    with pytest.raises(TaskError, match=said):
        check_first_loss(Task("task.py", model, pairs, loss), net, next(pairs(8)), 0)


def test_a_detached_loss_is_an_error() -> None:
    task = Task("task.py", model, pairs, lambda out, y: F.mse_loss(out.detach(), y))
    with pytest.raises(TaskError, match="a loss without a gradient"):
        check_first_loss(task, model(), next(pairs(8)), 0)
