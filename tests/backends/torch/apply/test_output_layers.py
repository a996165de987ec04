"""The end of a model: outputs, last activations and losses are float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec.backends.torch.apply.output_layers import find_output_layers
from tests.backends.torch.operated import BFLOAT16, apply

pytestmark = pytest.mark.torch

LOW, FULL = torch.bfloat16, torch.float32


class Returning(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.wrap = wrap

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.wrap(self.linear(inputs))


@dataclass
class Output:
    logits: torch.Tensor
    note: str = "kept"


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: x, lambda y: y),
        (lambda x: (x, 3), lambda y: y[0]),
        (lambda x: {"logits": x, "aux": [x]}, lambda y: y["aux"][0]),
        (Output, lambda y: y.logits),
        (lambda x: x.max(dim=-1), lambda y: y.values),
    ],
)
def test_outputs_leave_in_float32_whatever_holds_them(wrap: Any, unwrap: Any) -> None:
    model = Returning(wrap)
    precision = apply(BFLOAT16, model)
    with precision.autocast():
        output = model(torch.ones(1, 2))
    assert unwrap(output).dtype is FULL
    assert type(output) is type(wrap(torch.ones(1, 2)))


class SeenSoftmax(nn.Softmax):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.dtype = inputs.dtype
        return super().forward(inputs)


class SeenLoss(nn.MSELoss):
    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.dtype = outputs.dtype
        return super().forward(outputs, targets)


def test_a_last_activation_runs_in_float32_and_an_inner_one_does_not() -> None:
    inner, last = SeenSoftmax(dim=-1), SeenSoftmax(dim=-1)
    body = nn.Sequential(nn.Linear(2, 2), inner, nn.Linear(2, 2))
    model = nn.Sequential(body, last)
    precision = apply(BFLOAT16, model)
    with precision.autocast():
        model(torch.ones(1, 2))
    assert last.dtype is FULL
    assert inner.dtype is LOW
    assert precision.report.outputs == ("1",)


def test_a_loss_inside_the_model_is_computed_in_float32() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.loss = SeenLoss()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.loss(self.linear(inputs), torch.zeros(1, 1))

    model = WithLoss()
    precision = apply(BFLOAT16, model)
    with precision.autocast():
        assert model(torch.ones(1, 2)).dtype is FULL
    assert model.loss.dtype is FULL
    assert precision.report.outputs == ("loss",)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class ReturnsFunction(Body):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.linear(inputs), dim=-1).squeeze(0)


class ReturnsName(Body):
    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, int]:
        hidden = self.linear(inputs)
        output = hidden.log_softmax(-1)
        return output, 1


class ReturnsChild(Body):
    def __init__(self) -> None:
        super().__init__()
        self.head = ReturnsFunction()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result = self.head(self.linear(inputs))
        return result  # noqa: RET504 (names are looked up)


class AttendsOnly(Body):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weights = F.softmax(inputs @ inputs.T, dim=-1)
        return self.linear(weights @ inputs)


@pytest.mark.parametrize(
    ("model", "ends"),
    [
        (ReturnsFunction(), ("",)),
        (ReturnsName(), ("",)),
        (ReturnsChild(), ("head",)),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())), ("1.1",)),
        (nn.Sequential(nn.Linear(2, 2), ReturnsName()), ("1",)),
        (nn.Linear(2, 2), ()),
        (AttendsOnly(), ()),
        (nn.Sequential(), ()),
    ],
)
def test_the_end_of_a_model_is_read_from_its_source(
    model: nn.Module, ends: tuple[str, ...]
) -> None:
    assert find_output_layers(model) == ends


def test_a_softmax_written_as_a_function_is_computed_in_float32() -> None:
    model = ReturnsFunction()
    precision = apply(BFLOAT16, model)
    inputs = torch.randn(1, 2)
    with precision.autocast():
        output = model(inputs)
        logits = F.linear(inputs, model.linear.weight, model.linear.bias)
    assert torch.equal(output, F.softmax(logits.float(), dim=-1).squeeze(0))
    assert precision.report.outputs == ("",)
