"""A small PyTorch task, and profiles to apply to it."""

from __future__ import annotations

from typing import Any

import torch
from factories import profile_of
from torch import nn

from autoprec import Profile, Recipe
from autoprec.api import device_fingerprint
from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import Policy


def make_profile(
    recipe: Recipe, fingerprint: Fingerprint | None = None, **software: str
) -> Profile:
    here = fingerprint or device_fingerprint("cpu")
    return profile_of(recipe, "torch", here, torch=torch.__version__, **software)


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
