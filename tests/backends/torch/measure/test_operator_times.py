"""Which operators take a step's time, by the profiler: in their dtype, and they alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends.protocol import ProfiledSession, Task
from autoprec.backends.torch.measure.session import TorchSession
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import OperatorTime
from autoprec.core.recipe import Recipe

WIDTH = 256


class Net(nn.Module):
    """Linear layers, and one product whose author casts to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            hidden = torch.bmm(hidden.float()[None], self.first.weight.t()[None])[0]
        found: Tensor = self.last(hidden)
        return found.squeeze(-1)


def data(batch_size: int) -> Iterator[Any]:
    while True:
        x = torch.randn(batch_size, WIDTH)
        yield x, x.sum(-1)


def profiled(policy: Policy, accumulation_steps: int = 1) -> tuple[OperatorTime, ...]:
    task = Task("net.py", Net, data, nn.functional.mse_loss)
    recipe = Recipe(policy, batch_size=64, accumulation_steps=accumulation_steps)
    session = TorchSession(task, recipe, device="cpu", seed=0, report=lambda *_: None)
    try:
        assert isinstance(session, ProfiledSession)
        return session.operator_times()
    finally:
        session.close()


@pytest.mark.parametrize("steps", [1, 2])
def test_operators_are_named_with_their_dtype_and_the_update_apart(steps: int) -> None:
    found = profiled(Policy.MIXED_BFLOAT16, steps)
    shares = [each.share for each in found]
    assert shares == sorted(shares, reverse=True)
    assert 0.9 < sum(shares) <= 1.0 + 1e-9
    known = {(each.name, each.dtype, each.updates) for each in found}
    assert ("aten::bmm", "float32", False) in known
    assert ("aten::bmm", "bfloat16", False) not in known
    assert any(n in ("aten::addmm", "aten::mm") and d == "bfloat16" for n, d, _ in known)
    updates = {name for name, _, is_update in known if is_update}
    assert updates
    assert not any("mm" in name for name in updates)
    assert not any("Backward" in name or "autograd" in name for name, _, _ in known)


def test_under_float32_nothing_is_said_to_run_in_16_bits() -> None:
    found = {each.dtype for each in profiled(Policy.FLOAT32)}
    assert "float32" in found
    assert not found & {"bfloat16", "float16", "float8"}
