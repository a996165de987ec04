"""A batch that is longer than the first ones is compared, wherever in the data it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.tuning.proof.recipe_proof import Proof
from tests.tuning.proof.test_buffers_torch import BFLOAT16, silent

pytestmark = pytest.mark.torch


class Positions(nn.Module):
    """Reads the last position of a sequence, which training in bfloat16 cannot count beyond 256."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.body(x)
        places = torch.arange(x.shape[1]).to(hidden.dtype if self.training else torch.float32)
        return self.head(torch.sin(hidden + 0.5 * places[:, None])[:, -1])


def data(long_at: int) -> Any:
    def build_data(batch_size: int) -> Iterator[Any]:
        for index in range(150):
            generator = torch.Generator().manual_seed(index)
            length = 3000 if index == long_at else 4
            x = torch.randn(batch_size, length, 8, generator=generator)
            yield x, x[:, -1, :4].argmax(-1)

    return build_data


@pytest.mark.parametrize(
    ("long_at", "surveyed", "verdict"),
    [(20, None, "drift"), (100, 150, "drift"), (100, 0, "equal")],
    ids=["in the first steps", "all over the data", "never looked at"],
)
def test_a_long_batch_is_met(long_at: int, surveyed: int | None, verdict: str) -> None:
    task = Task(
        name="t",
        build_model=Positions,
        build_data=data(long_at),
        loss_fn=nn.functional.cross_entropy,
        surveyed=surveyed,
    )
    tracer = TorchBackend().tracer(task, device="cpu", seed=0, report=silent)
    found = Proof(tracer, steps=30).prove(BFLOAT16)
    assert found.verdict == verdict, found.reason
    assert ("a step on the largest batch" in found.covered) is (verdict == "drift")
    if verdict == "drift":
        assert "on the largest batch, at the same weights of step 29" in found.reason
