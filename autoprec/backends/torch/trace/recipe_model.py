"""How a trace gets a model under a recipe: built, applied, and stepped like the user's loop."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.train.rng import seed_everything
from autoprec.backends.torch.train.task_runner import compute_loss, move
from autoprec.core.recipe import Recipe


class Applied(Protocol):
    """What a trace uses of a Precision object."""

    scaler: Any

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward pass."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the loss."""

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Clip on the accumulation boundary."""

    def step(self) -> bool:
        """Update on the boundary; return whether weights changed."""


@dataclass
class Trainee:
    """A model with its optimizer under one recipe."""

    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Applied
    device: str
    changed: bool = True

    def loss(self, batch: Any, seed: int) -> torch.Tensor:
        """Compute the loss of one batch, with random numbers (dropout) drawn from `seed`."""
        batch = move(batch, self.device)
        seed_everything(seed)
        return compute_loss(self.task, self.model, batch, self.precision)

    def update(self) -> bool:
        """Clip as the task says and step; return False if the update was skipped."""
        if self.task.clip_grad_norm is not None:
            self.precision.clip_grad_norm_(self.task.clip_grad_norm)
        return self.precision.step()

    @property
    def scale(self) -> float:
        """Return the current loss scale, 1 without one."""
        scaler = self.precision.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())


class PlainFloat32:
    """The user's own float32 loop: no autocast, no scaler; gradients averaged over parts."""

    scaler: Any = None

    def __init__(self, optimizer: torch.optim.Optimizer, accumulation: int):
        self._optimizer = optimizer
        self._accumulation, self._seen = accumulation, 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return an empty context."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the loss, divided by the accumulation steps."""
        (loss / self._accumulation).backward()  # type: ignore[no-untyped-call]
        self._seen += 1

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Clip the norm of the optimizer's gradients, as a recipe does, on the boundary."""
        if self._seen % self._accumulation == 0:
            groups = self._optimizer.param_groups
            return nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], max_norm)
        return None

    def step(self) -> bool:
        """Step and clear the gradients on the accumulation boundary."""
        if self._seen % self._accumulation:
            return False
        self._optimizer.step()
        self._optimizer.zero_grad()
        return True


def apply_recipe(
    recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> Applied:
    """Apply `recipe` to a model as `apply_profile` would."""
    from autoprec.backends.torch.apply.surgeon import TorchSurgeon

    applied: Applied = TorchSurgeon().apply(
        recipe, model=model, optimizers=(optimizer,), device=device
    )
    return applied
