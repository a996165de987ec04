"""A small PyTorch task, and profiles to apply to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoprec import Profile, Recipe
from autoprec.api import device_fingerprint
from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import Baseline, Chosen, DeviceRecord, Evidence, TaskRecord
from autoprec.core.statistics import Ratio


def make_profile(
    recipe: Recipe, fingerprint: Fingerprint | None = None, **software: str
) -> Profile:
    here = fingerprint or device_fingerprint("cpu")
    return Profile(
        schema=1,
        created="2026-11-21T00:00:00Z",
        autoprec="0.1.0",
        task=TaskRecord("model.py", "0" * 64, "torch"),
        device=DeviceRecord(here.kind, here.name, here.family, here),
        software={"torch": torch.__version__, **software},
        recipe=recipe,
        evidence=Evidence(
            baseline=Baseline(Policy.FLOAT32, 32, 100.0, 0.32, 1),
            chosen=Chosen(200.0, 0.16, 1),
            speedup=Ratio(2.0, 1.9, 2.1, 9),
            speedup_same_batch=None,
            parity=Verdict("equal", "as an example"),
            trials=3,
            tuning_seconds=1.0,
            reason="an example",
        ),
    )


ELSEWHERE = Fingerprint(DeviceKind.CUDA, "nvidia-h100", "NVIDIA H100", 80)
BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=16)


def task() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, precision: Any, steps: int = 3) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(16, 8, generator=generator)
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(inputs), torch.arange(16) % 4)
        precision.backward(loss)
        precision.clip_grad_norm_(1.0)
        assert precision.step()
        losses.append(loss.item())
    precision.flush()
    return losses
