"""docs/trainers.md: Lightning with manual optimization."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy, Recipe
from autoprec.core.recipe import LossScale
from tests.code_blocks import block

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("without_tensorflow"),
    pytest.mark.filterwarnings("default"),  # Lightning's own
]


@pytest.mark.parametrize("policy", [Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16])
def test_manual_optimization(
    policy: Policy, write_profile: Callable[[Recipe, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = LossScale(initial=1024.0) if policy.needs_loss_scale else None
    recipe = Recipe(policy=policy, batch_size=32, accumulation_steps=2, loss_scale=scale)
    monkeypatch.chdir(write_profile(recipe, "torch").parent)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(block("docs/trainers.md", 0), names)
    names["precision"].restore()
    names["model"] = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    exec(block("docs/trainers.md", 2), names)
    inputs, targets = names["data"].tensors
    with torch.no_grad():
        right = names["model"](inputs).argmax(1) == targets
    assert right.float().mean() > 0.9
    assert names["trainer"].current_epoch == 5
    assert names["trainer"].global_step == 0  # as the page says
