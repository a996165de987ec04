"""What cannot be padded is left as it is, with its reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec.backends.torch.apply.padding import padding_obstacle
from autoprec.core.recipe import Alignment, Recipe
from tests.backends.torch.operated import apply

pytestmark = pytest.mark.torch


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.topk(self.scores(inputs), 2).values


class OwnLinear(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * 2


def replaced() -> nn.Module:
    layer = nn.Linear(5, 3)
    layer.forward = lambda inputs: inputs
    return layer


@pytest.mark.parametrize(
    ("module", "path", "reason"),
    [
        (nn.Conv2d(4, 6, 3, groups=2), "", "grouped convolution (2 groups)"),
        (nn.ModuleDict({"router": nn.Linear(5, 3)}), "router", "looks like a router"),
        (nn.ModuleDict({"gate": nn.Sequential(nn.Linear(5, 3))}), "gate.0", "looks like a router"),
        (Chooses(), "scores", "calls topk"),
        (OwnLinear(5, 3), "", "computes in its own way"),
        (replaced(), "", "forward was replaced"),
        (nn.LazyLinear(3), "", "not initialised"),
        (nn.Embedding(4, 5, sparse=True), "", "gradient is sparse"),
        (nn.Embedding(4, 5, max_norm=1.0), "", "max_norm"),
        (nn.MultiheadAttention(6, 2), "out_proj", "never called"),
        (nn.MultiheadAttention(6, 2, kdim=3), "", "another width"),
        (nn.MultiheadAttention(6, 2, add_bias_kv=True), "", "keys of its own"),
        (nn.Linear(8, 16), "", "multiple of 8 already"),
        (nn.ConvTranspose2d(3, 5, 3), "", "not ConvTranspose2d"),
        (nn.Linear(5, 3), "gone", "no module of that name"),
    ],
)
def test_what_cannot_be_padded_is_skipped_with_its_reason(
    module: nn.Module, path: str, reason: str
) -> None:
    assert reason in padding_obstacle(module, path, 8)
    report = apply(Recipe(alignment=Alignment(8, (path,))), module).report
    assert [s.path for s in report.skipped] == [path]
    assert reason in report.skipped[0].reason
    assert not report.padded


def test_a_gated_projection_is_no_router() -> None:
    assert padding_obstacle(nn.ModuleDict({"gate_proj": nn.Linear(5, 3)}), "gate_proj", 8) == ""
