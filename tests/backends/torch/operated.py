"""Small models and recipes that several tests of the surgeon train for real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.precision import Precision
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe

FLOAT32 = Recipe()
BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16)
FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=1024.0))


RECIPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}


def float16(**scale: Any) -> Recipe:
    return Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(**scale))


def apply(
    recipe: Recipe,
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    compile_backend: Any = "eager",
) -> Precision:
    surgeon = TorchSurgeon(compile_backend=compile_backend)
    return surgeon.apply(recipe, model=model, optimizers=optimizers, device="cpu")


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def accumulating(recipe: Recipe, steps: int) -> Recipe:
    return replace(recipe, accumulation_steps=steps)


def batches(count: int, size: int = 8, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 6, generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def train(
    precision: Precision,
    model: nn.Module,
    data: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    clip: float | None = None,
    overflow_at: Sequence[int] = (),
) -> list[bool]:
    """Run the documented loop; at the planted indices the loss is multiplied into infinity."""
    changed = []
    for index, (inputs, targets) in enumerate(data):
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        precision.backward(loss * (1e38 if index in overflow_at else 1.0))
        if clip is not None:
            precision.clip_grad_norm_(clip)
        changed.append(precision.step())
    return changed


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def process_readings() -> list[Any]:
    """Return the process-wide settings that a recipe may change."""
    return [
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.get_num_threads(),
    ]
