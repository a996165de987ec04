"""The same training written twice: in plain torch, and with `apply_profile` as documented.

A task is a module in the form `autoprec tune` reads. Two more functions say what a loop does beside
it: `build_optimizers` gives several optimizers, and `losses` one loss for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autoprec import Recipe, apply_profile
from autoprec.core.dtypes import DType

Autocast = Callable[[], AbstractContextManager[Any]]
Optimizers = Sequence[torch.optim.Optimizer]

DTYPES = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


@dataclass(frozen=True)
class Trained:
    """The losses of every micro-batch, and the model they leave."""

    losses: list[float]
    model: nn.Module
    precision: Any = None


def start(task: ModuleType) -> tuple[nn.Module, Optimizers]:
    """A model and its optimizers, the same in every call."""
    torch.manual_seed(0)
    model = task.build_model().train()
    several = getattr(task, "build_optimizers", None)
    optimizers = several(model) if several else [task.build_optimizer(model)]
    torch.manual_seed(2)
    return model, optimizers


def batches(task: ModuleType, recipe: Recipe, steps: int) -> list[Any]:
    """The micro-batches of so many steps, the same in every call."""
    torch.manual_seed(1)
    return list(islice(task.build_data(recipe.batch_size), steps * recipe.accumulation_steps))


def plain(task: ModuleType, recipe: Recipe, steps: int) -> Trained:
    """Train in the loop of PyTorch's own documentation."""
    data = batches(task, recipe, steps)
    model, optimizers = start(task)
    dtype = DTYPES.get(recipe.policy.compute_dtype)
    scale = recipe.loss_scale.initial if recipe.loss_scale else 1.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=recipe.policy.needs_loss_scale)
    parts = recipe.accumulation_steps

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)

    seen = []
    for count, batch in enumerate(data, 1):
        for index, loss in losses(task, model, batch, autocast):
            own = optimizers if index is None else [optimizers[index]]
            only = {} if index is None else {"inputs": parameters(own)}
            scaler.scale(loss / parts).backward(**only)
            seen.append(loss.item())
            if count % parts == 0:
                for optimizer in own:
                    scaler.unscale_(optimizer)
                if hasattr(task, "CLIP_GRAD_NORM"):
                    nn.utils.clip_grad_norm_(parameters(own), task.CLIP_GRAD_NORM)
                for optimizer in own:
                    scaler.step(optimizer)
                    optimizer.zero_grad()
        if count % parts == 0:
            scaler.update()
    return Trained(seen, model)


def applied(task: ModuleType, recipe: Recipe, steps: int, given: Path | None = None) -> Trained:
    """Train in the documented long loop, with a recipe or with the profile in the file `given`."""
    data = batches(task, recipe, steps)
    model, optimizers = start(task)
    precision = apply_profile(given or recipe, model=model, optimizer=list(optimizers))
    seen = []
    for batch in data:
        for index, loss in losses(task, model, batch, precision.autocast):
            own = None if index is None else optimizers[index]
            precision.backward(loss, optimizer=own)
            seen.append(loss.item())
            if hasattr(task, "CLIP_GRAD_NORM"):
                precision.clip_grad_norm_(task.CLIP_GRAD_NORM, optimizer=own)
            precision.step(own)
    precision.flush()
    return Trained(seen, model, precision)


def losses(
    task: ModuleType, model: nn.Module, batch: Any, autocast: Autocast
) -> Iterator[tuple[int | None, Tensor]]:
    """The losses of a batch, each with the number of the optimizer it is for, None for all."""
    if hasattr(task, "losses"):
        yield from task.losses(model, batch, autocast)
    elif hasattr(task, "training_step"):
        with autocast():
            loss = task.training_step(model, batch)
        yield None, loss
    else:
        inputs, targets = batch
        with autocast():
            outputs = model(inputs)
        yield None, task.loss_fn(tree_map(raised, outputs), targets)


def raised(value: Any) -> Any:
    """A 16-bit tensor as float32: the loss is computed from that, outside autocast."""
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def parameters(optimizers: Optimizers) -> list[nn.Parameter]:
    """The parameters of these optimizers."""
    return [p for each in optimizers for group in each.param_groups for p in group["params"]]
