"""What only evaluation computes: a precision that breaks it does not train like float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.numerics.verdict import Verdict
from autoprec.tuning.proof.recipe_proof import Proof
from tests.tuning.proof.test_buffers_torch import BFLOAT16, data, silent

pytestmark = pytest.mark.torch


class Evaluating(nn.Module):
    """A classifier that centres its features around an offset, in evaluation alone."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.body, self.head, self.offset = nn.Linear(16, 32), nn.Linear(32, 4), offset

    def forward(self, x: torch.Tensor) -> Any:
        features = self.body(x)
        if not self.training:
            features = (features + self.offset) - self.offset
        return self.head(torch.relu(features))


def proven(offset: float) -> Verdict:
    task = Task(
        name="t",
        build_model=lambda: Evaluating(offset),
        build_data=data,
        loss_fn=nn.functional.cross_entropy,
    )
    tracer = TorchBackend().tracer(task, device="cpu", seed=0, report=silent)
    return Proof(tracer, steps=30).prove(BFLOAT16)


def test_a_branch_that_only_evaluation_takes_is_compared() -> None:
    whole, broken = proven(0.0), proven(2000.0)
    assert whole.verdict == "equal", whole.reason
    assert "the model's outputs in evaluation" in whole.covered
    assert broken.verdict == "drift"
    assert "in evaluation, at the weights of step 29" in broken.reason
