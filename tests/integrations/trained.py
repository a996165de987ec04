"""A small model, recipes and the loop of reference that tests of several trainers share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autoprec import Policy, Recipe, apply_profile
from autoprec.core.recipe import Alignment, LossScale

LOW, FULL = torch.bfloat16, torch.float32


class Net(nn.Module):
    """Images to three classes: a convolution, norms, dropout, and a layer of 30 features."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.exact = nn.Linear(8, 16)
        self.layer_norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.wide = nn.Linear(16, 30)
        self.head = nn.Linear(30, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(images)).relu().mean((2, 3))
        hidden = self.dropout(self.layer_norm(self.exact(hidden)))
        return self.head(self.wide(hidden).relu())


def net(dropout: float = 0.1) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


def images(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, (count,), generator=generator)
    pixels = torch.randn(count, 3, 6, 6, generator=generator)
    return pixels + targets.float().view(-1, 1, 1, 1), targets


def recipe_of(policy: Policy, **settings: Any) -> Recipe:
    """Return a recipe with all that a trainer has to apply: island, padding, layout."""
    scale = LossScale(initial=1024.0) if policy.needs_loss_scale else None
    return Recipe(
        **{
            "policy": policy,
            "batch_size": 8,
            "accumulation_steps": 2,
            "float32_modules": ("exact",) if policy.mixed else (),
            "alignment": Alignment(8, ("wide",)),
            "memory_format": "channels_last",
            "loss_scale": scale,
            **settings,
        }
    )


SCALE = LossScale(initial=1024.0, growth_interval=3, floor=256.0)
OVERFLOWS = (2, 5, 6, 7)  # the updates that overflow in tests of the scale, from 1
SCALES = [1024.0, 512.0, 512.0, 512.0, 256.0, 256.0, 256.0, 256.0, 256.0, 512.0]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def loader(count: int, batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*images(count)), batch_size=batch)


POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16)


def reference(
    recipe: Recipe,
    data: tuple[torch.Tensor, torch.Tensor],
    *,
    epochs: int,
    clip: float | None = 1.0,
    dropout: float = 0.1,
) -> tuple[list[float], nn.Module]:
    """Train by our own loop, with the loss under autocast; return micro-batch losses and model."""
    model = net(dropout)
    optimizer = momentum(model.parameters())
    precision = apply_profile(recipe, model=model, optimizer=optimizer)
    losses: list[float] = []
    pixels, targets = data
    batches = list(
        zip(pixels.split(recipe.batch_size), targets.split(recipe.batch_size), strict=True)
    )
    for _ in range(epochs):
        for inputs, labels in precision.batches(batches):
            torch.manual_seed(len(losses))  # for dropout: loaders draw random numbers as well
            with precision.autocast():
                loss = nn.functional.cross_entropy(model(inputs), labels)
            losses.append(loss.item())
            precision.backward_and_step(loss, max_norm=clip)
    precision.restore()
    return losses, model


@dataclass
class Seen:
    """What modules of a `Net` computed with, by phase: "train" or "eval"."""

    dtypes: dict[tuple[str, str], set[torch.dtype]] = field(default_factory=dict)
    columns: set[int] = field(default_factory=set)
    strides: set[bool] = field(default_factory=set)

    def of(self, phase: str) -> dict[str, set[torch.dtype]]:
        return {name: found for (where, name), found in self.dtypes.items() if where == phase}


RIGHT = {"conv": {LOW}, "exact": {FULL}, "wide": {LOW}, "head": {LOW}}


@contextmanager
def watched(model: nn.Module) -> Iterator[Seen]:
    """Note what the products of a `Net` run in: dtypes, padded columns, layout."""
    seen = Seen()
    linear = nn.functional.linear

    def note_linear(inputs: Any, weight: Any, bias: Any = None) -> Any:
        if weight.shape[0] > 16:
            seen.columns.add(weight.shape[0])
        return linear(inputs, weight, bias)

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: Any, result: torch.Tensor) -> None:
            phase = "train" if module.training else "eval"
            seen.dtypes.setdefault((phase, name), set()).add(result.dtype)
            if name == "conv":
                seen.strides.add(args[0].is_contiguous(memory_format=torch.channels_last))

        return note

    handles = [
        module.register_forward_hook(hook(name))
        for name, module in model.named_modules()
        if name in RIGHT
    ]
    nn.functional.linear = note_linear
    try:
        yield seen
    finally:
        nn.functional.linear = linear
        for handle in handles:
            handle.remove()


def wrapped_modules(model: nn.Module) -> list[str]:
    """Name the modules that have a forward of their own."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def relative(found: nn.Module, expected: nn.Module) -> float:
    """Return the largest relative difference of two models' weights, by tensor norms."""
    pairs: Sequence[tuple[Any, Any]] = list(
        zip(found.state_dict().values(), expected.state_dict().values(), strict=True)
    )
    return max(
        float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12)) for a, b in pairs
    )
