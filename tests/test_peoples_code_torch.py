"""Code as people write it, through `apply_profile` and the command line alone."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributions, nn
from torch.optim.swa_utils import AveragedModel

from autoprec import Policy, Recipe, apply_profile
from autoprec.cli import main

BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=16)

#: A recurrent model that keeps the hidden state of its 32 streams from batch to batch.
STATEFUL = """
import torch
from torch import nn

class Streams(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.last = nn.GRU(8, 64, batch_first=True), nn.Linear(64, 1)
        self.register_buffer("hidden", torch.zeros(1, 32, 64))

    def forward(self, x):
        out, hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return self.last(out)

build_model = Streams

def build_data(batch_size):
    while True:
        yield torch.randn(batch_size, 5, 8), torch.randn(batch_size, 5, 1)

loss_fn = nn.functional.mse_loss
"""

#: Two views of each of 32 samples, with the places of the matching ones made once.
CONTRASTIVE = """
import torch
from torch import nn

PLACES = torch.arange(32)

def build_model():
    return nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 64))

def build_data(batch_size):
    while True:
        x = torch.randn(batch_size, 8)
        yield x, x + 0.1 * torch.randn(batch_size, 8)

def training_step(model, batch):
    one, other = (nn.functional.normalize(model(each), dim=-1) for each in batch)
    return nn.functional.cross_entropy(one @ other.T / 0.1, PLACES)
"""

#: A script that trains with the profile which a tuning of it is to write.
TRAIN = """
import torch
from autoprec import apply_profile

def build_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

model = build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
precision = apply_profile("model.profile.yaml", model=model, optimizer=optimizer)

def training_step(model, batch):
    with precision.autocast():
        outputs = model(batch[0])
    return (outputs - batch[1]).square().mean()

def build_data(batch_size):
    for _ in range(4 * precision.accumulation_steps):
        yield torch.randn(batch_size, 4), torch.ones(batch_size, 1)
"""
TASK = "from train import build_data, build_model, training_step\nBATCH_SIZE = 16\n"


class Output(NamedTuple):
    """What a policy of reinforcement learning returns."""

    action: distributions.Distribution
    extra: dict[str, Any]


class Features:
    """An object of one's own, without a dictionary."""

    __slots__ = ("pyramid",)

    def __init__(self, *pyramid: torch.Tensor) -> None:
        self.pyramid = [*pyramid]


class Actor(nn.Module):
    """Returns what `wrap` makes of its last product."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.body, self.wrap = nn.Linear(6, 4), wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.body(x))


def tensors_of(output: Any) -> list[torch.Tensor]:
    if isinstance(output, Output):
        return [output.action.log_prob(torch.zeros(3, 4)), output.extra["state"].hidden]
    return output.pyramid


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: Output(distributions.Normal(x, 1.0), {"state": SimpleNamespace(hidden=x)}),
        lambda x: Features(x, x * 2),
    ],
    ids=["a distribution in a named tuple", "an object with slots"],
)
def test_outputs_leave_the_model_in_float32_whatever_holds_them(wrap: Any) -> None:
    model = Actor(wrap)
    precision = apply_profile(BFLOAT16, model=model)
    with precision.autocast():
        inside = tensors_of(model(torch.randn(3, 6)))
    outside = tensors_of(precision.forward(torch.randn(3, 6)))
    assert {each.dtype for each in (*inside, *outside)} == {torch.float32}


class Ema:
    """Weights averaged by hand, beside the model."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).eval().requires_grad_(False)

    def __call__(self, x: torch.Tensor) -> Any:
        return self.module(x)


@pytest.mark.parametrize("averaged", [Ema, AveragedModel])
def test_an_average_of_the_weights_is_evaluated_alike_wherever_it_was_made(averaged: Any) -> None:
    model, x = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)), torch.randn(5, 6)
    before = averaged(model)
    precision = apply_profile(BFLOAT16, model=model)
    after = averaged(model)
    with torch.no_grad(), precision.autocast():
        found = [before(x), after(x), model(x)]
    assert [each.dtype for each in found] == [torch.float32] * 3
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("text", [STATEFUL, CONTRASTIVE], ids=["stateful", "contrastive"])
def test_a_model_that_runs_at_one_batch_size_is_planned_at_that_alone(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tmp_path / "model.py"
    task.write_text(text)
    assert main(["tune", str(task), "--plan", "--device", "v100", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {each["batch"] for each in plan["estimates"]} == {32}


@pytest.mark.parametrize("is_tuned", [False, True])
def test_a_script_that_applies_its_own_profile_is_measured_in_float32(
    is_tuned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_profile: Callable[[Recipe, str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "model.py").write_text(TASK)
    if is_tuned:
        write_profile(BFLOAT16, "torch")
    assert main(["tune", "model.py", "--plan", "--device", "v100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["low_precision"] == ""


class Decorated(nn.Module):
    """Its forward has an autocast of its own, as nn.DataParallel needs it."""

    def __init__(self, dtype: torch.dtype, *, is_on: bool) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.dtype, self.is_on = dtype, is_on

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", self.dtype, enabled=self.is_on):
            return self.inside(x)


def warned(model: nn.Module) -> list[str]:
    """What a loop of `precision.forward` and `backward_and_step` is warned of."""
    precision = apply_profile(
        BFLOAT16, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), watch=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            precision.backward_and_step(precision.forward(torch.randn(4, 6)).square().mean())
    assert not any(module._forward_pre_hooks for module in model.modules())
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("dtype", "is_on"), [(torch.bfloat16, False), (torch.float16, True)])
def test_an_autocast_of_the_models_own_around_its_layers_is_named(
    dtype: torch.dtype, is_on: bool
) -> None:
    (text,) = warned(Decorated(dtype, is_on=is_on))
    assert text.startswith("the model's own code switches the profile's autocast off, or opens")
    assert "none runs as mixed_bfloat16 says" in text


def test_an_autocast_as_the_profile_has_it_is_nothing_to_say() -> None:
    assert warned(Decorated(torch.bfloat16, is_on=True)) == []
