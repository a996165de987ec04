"""Profiles of tasks that a proof could misjudge: `verify` judges them as a tuning does.

Speeds are left out: they are measured alike whatever the task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import verify
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.recipe import Recipe
from autoprec.profiles import load_profile
from autoprec.tuning.flow import verification

pytestmark = pytest.mark.torch

BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16, 32)

#: A task of two classes; `between` is what its model does between its layers.
TASK = """
import functools
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Raising(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x, dtype=torch.float32).index_add_(0, torch.arange(len(x)), x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.raising = {first}, Raising()
        self.last = {last}

    def forward(self, x):
        x = self.first(x)
        return self.last({between})

def build_model():
    return Net()

def build_data(batch_size):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (640,), generator=generator)
    x = torch.randn(640, {shape}, generator=generator)
    x += y.view(-1, *[1] * (x.ndim - 1))
    return DataLoader(TensorDataset(x, {targets}), batch_size, drop_last=True, {workers})

def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), {rate})

loss_fn = nn.functional.{loss}
{after}
"""
DENSE = {
    "first": "nn.Linear(16, 32)",
    "last": "nn.Linear(32, 2)",
    "between": "x.relu()",
    "shape": "16",
    "targets": "y",
    "workers": "num_workers=0",
    "rate": 0.1,
    "loss": "cross_entropy",
    "after": "",
}
IMAGES = {
    "first": "nn.Conv2d(3, 8, 3, padding=1)",
    "last": "nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(288, 2))",
    "between": "nn.functional.dropout(x.relu(), 0.5)",
    "shape": "3, 8, 8",
}

Verified = Callable[..., tuple[str, Verdict]]


@pytest.fixture
def verified(
    tmp_path: Path, write_profile: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Verified:
    """Verify a profile that says "equal" of 12 steps, or of so many; return result and verdict."""
    monkeypatch.setattr(verification, "_time_again", lambda *_: ())

    def run(
        recipe: Recipe, steps: int = 12, checkpoint: Path | None = None, **parts: Any
    ) -> tuple[str, Verdict]:
        task = tmp_path / "model.py"
        task.write_text(TASK.format(**{**DENSE, **parts}))
        profile = load_profile(write_profile(recipe, "torch"))
        stated = Verdict("equal", "trains like float32", steps=steps, most_steps=steps)
        evidence = replace(profile.evidence, parity=stated)
        found = verify(
            replace(profile, evidence=evidence), task, device="cpu", checkpoint=checkpoint
        )
        (numerics,) = [claim.result for claim in found.claims if claim.name == "numerics"]
        assert found.parity is not None
        return numerics, found.parity

    return run


def test_dropout_between_convolutions_draws_alike_in_every_layout(verified: Verified) -> None:
    laid_out = Recipe(Policy.MIXED_BFLOAT16, 32, memory_format="channels_last")
    result, verdict = verified(laid_out, **IMAGES)
    assert result == "holds", verdict.reason


def test_a_generator_of_the_tasks_own_draws_alike_in_every_run(verified: Verified) -> None:
    result, verdict = verified(
        BFLOAT16,
        between="x.relu() * (torch.rand(x.shape, generator=DRAWS) > 0.5)",
        after="DRAWS = torch.Generator().manual_seed(5)",
    )
    assert result == "holds", verdict.reason


def test_modules_that_raise_hold_where_the_profile_keeps_them_in_float32(
    verified: Verified,
) -> None:
    result, verdict = verified(BFLOAT16, between="self.raising(x)")
    assert result == "fails"
    assert "raises" in verdict.reason
    kept = Recipe(Policy.MIXED_BFLOAT16, 32, float32_modules=("raising",))
    assert verified(kept, between="self.raising(x)")[0] == "holds"


def test_what_breaks_late_fails_from_the_weights_of_a_checkpoint(
    verified: Verified, tmp_path: Path
) -> None:
    between = "(x - self.first.bias).relu()"
    assert verified(BFLOAT16, between=between)[0] == "holds"
    first, last = nn.Linear(16, 32), nn.Linear(32, 2)
    nn.init.constant_(first.bias, 4096.0)
    names = {"first": first, "last": last}
    torch.save(nn.ModuleDict(names).state_dict(), tmp_path / "late.pt")
    result, verdict = verified(BFLOAT16, checkpoint=tmp_path / "late.pt", between=between)
    assert result == "fails", verdict.reason


def test_numbers_far_from_zero_between_layers_fail(verified: Verified) -> None:
    result, verdict = verified(BFLOAT16, between="((x + 4096.0) - 4096.0).relu()")
    assert result == "fails"
    assert verdict.verdict in ("drift", "rejected"), verdict.reason


def test_losses_that_end_near_zero_are_told_as_such(verified: Verified) -> None:
    zero = {"targets": "torch.zeros(640, 2)", "loss": "mse_loss", "rate": 0.5}
    linear = {"first": "nn.Identity()", "last": "nn.Linear(2, 2, bias=False)", "shape": "2"}
    result, verdict = verified(BFLOAT16, 30, **zero, **linear, between="x")
    assert result == "holds", verdict.reason
    assert "both end below" in verdict.reason


#: Its layer is that of a teacher, from whose outputs the targets move away after the first step.
TAUGHT = """
WEIGHT = torch.randn(2, 16, generator=torch.Generator().manual_seed(3))

def taught(layer):
    layer.weight.data.copy_(WEIGHT)
    return layer

def build_data(batch_size):
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, nn.functional.linear(x, WEIGHT) * (1.0 + {move} * min(step, 10))
"""


@pytest.mark.parametrize(
    ("move", "expected", "said"),
    [
        (0.1, "holds", "trains like float32"),
        (0.0, "unresolved", "float32's loss is zero at every step"),
    ],
)
def test_a_student_that_begins_as_its_teacher_is_judged_by_what_follows(
    move: float, expected: str, said: str, verified: Verified
) -> None:
    layers = {"first": "nn.Identity()", "last": "taught(nn.Linear(16, 2, bias=False))"}
    after = TAUGHT.format(move=move)
    result, verdict = verified(
        BFLOAT16, 12, **layers, between="x", loss="mse_loss", rate=0.01, after=after
    )
    assert (result, said in verdict.reason) == (expected, True), verdict.reason


@pytest.mark.parametrize("after", ["", "build_data = functools.cache(build_data)"])
def test_a_loader_that_keeps_its_workers_is_gone_through(after: str, verified: Verified) -> None:
    kept = "shuffle=True, num_workers=1, persistent_workers=True"
    result, verdict = verified(BFLOAT16, workers=kept, after=after)
    assert result == "holds", verdict.reason


def test_steps_without_learning_say_so(verified: Verified) -> None:
    result, verdict = verified(BFLOAT16, rate=0.0)
    assert result == "holds"
    assert "the loss did not fall in these steps" in verdict.reason
