"""Models that share modules: each keeps its own islands, dtype and undo."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from autoprec.backends.torch.apply.model_changes import restore
from autoprec.errors import UsageError
from tests.backends.torch.operated import (
    BFLOAT16,
    FLOAT16,
    apply,
)

pytestmark = pytest.mark.torch


class OnBackbone(nn.Module):
    """A head on a backbone that other models use too."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(10, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(inputs))


class Narrow(nn.Module):
    """Says in which dtype its own code computes."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = inputs.dtype
        return inputs.relu()


def test_models_that_share_a_backbone_keep_their_own_islands() -> None:
    backbone = nn.Sequential(nn.Linear(6, 10), Narrow())
    one, other = OnBackbone(backbone), OnBackbone(backbone)
    inputs = torch.ones(2, 6)
    kept = apply(replace(BFLOAT16, float32_modules=("backbone.1",)), one)
    second = apply(BFLOAT16, other)
    with kept.autocast():
        one(inputs)
    assert backbone[1].seen is torch.float32
    second.restore()
    with kept.autocast():
        one(inputs)
    assert backbone[1].seen is torch.float32
    kept.restore()
    with kept.autocast():
        one(inputs)
    assert backbone[1].seen is torch.bfloat16


def test_applying_again_to_one_of_them_replaces_its_own_islands_only() -> None:
    backbone = nn.Sequential(nn.Linear(6, 10), Narrow())
    one, other = OnBackbone(backbone), OnBackbone(backbone)
    apply(replace(BFLOAT16, float32_modules=("backbone.1",)), one)
    apply(BFLOAT16, one)
    with apply(BFLOAT16, other).autocast():
        other(torch.ones(2, 6))
    assert backbone[1].seen is torch.bfloat16


def test_a_shared_module_cannot_compute_in_two_dtypes() -> None:
    backbone = nn.Sequential(nn.Linear(6, 10), Narrow())
    one, other = OnBackbone(backbone), OnBackbone(backbone)
    first = apply(replace(BFLOAT16, float32_modules=("backbone.1",)), one)
    with pytest.raises(UsageError, match="is shared with a model that runs under"):
        apply(FLOAT16, other)
    first.restore()
    apply(FLOAT16, other)


def test_a_copy_of_an_applied_model_can_be_restored_by_itself() -> None:
    model = OnBackbone(nn.Sequential(nn.Linear(6, 10), Narrow()))
    precision = apply(replace(BFLOAT16, float32_modules=("backbone.1",)), model)
    copied = copy.deepcopy(model)
    restore(copied)
    with precision.autocast():
        copied(torch.ones(2, 6))
        model(torch.ones(2, 6))
    assert copied.backbone[1].seen is torch.bfloat16
    assert model.backbone[1].seen is torch.float32
