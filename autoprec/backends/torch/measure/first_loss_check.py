"""Checks a torch task's first loss and gradient: `autoprec.backends.shared.first_loss_check`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.shared.first_loss_check import (
    nonfinite_data,
    nonfinite_unit,
    require_trainable,
)
from autoprec.backends.torch.apply.nested_tensors import items_in, tensors_in
from autoprec.backends.torch.measure.step_costs import buffers_preserved
from autoprec.backends.torch.train.task_runner import compute_loss, seed_everything


def check_first_loss(task: Task, model: nn.Module, batch: Any, seed: int) -> None:
    """Run one forward and backward pass in float32, the user's code as it is.

    Raises `TaskError` where the loss is inf or NaN, with where that begins, where a gradient is,
    and where none reaches the weights. It leaves no trace in the model.
    """
    seed_everything(seed)
    try:
        with buffers_preserved(model):
            loss = compute_loss(task, model, batch, None)
            loss.backward()  # type: ignore[no-untyped-call]
            value = loss.item()
            grads = {name: _values(p.grad) for name, p in model.named_parameters()}
            reached = any(bool(grad.any()) for grad in grads.values() if grad is not None)
            wrong = [name for name, grad in grads.items() if not _all_finite(grad)]
    finally:
        model.zero_grad(set_to_none=True)
    require_trainable(
        task.name,
        value,
        nonfinite_gradients=wrong,
        moves_weights=reached,
        origin=lambda: _origin(task, model, batch, seed),
        detached="under torch.no_grad() or from detached tensors",
    )


def _values(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad.coalesce().values() if grad is not None and grad.is_sparse else grad


def _origin(task: Task, model: nn.Module, batch: Any, seed: int) -> str:
    """Say where inf or NaN appears first: in the batch, in a module, or in the loss."""
    names = ("inputs", "targets") if task.training_step is None else None
    for path, tensor in _named(batch, names):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            wrong = ~tensor.isfinite()
            rows = wrong.reshape(len(tensor), -1).any(1).nonzero() if tensor.dim() else wrong
            first = int(rows[0]) if tensor.dim() else None
            return nonfinite_data(int(wrong.sum()), wrong.numel(), path, first)
    where = "training_step" if task.training_step is not None else "loss_fn"
    return nonfinite_unit("module", _first_module(task, model, batch, seed), where)


def _named(value: Any, names: tuple[str, ...] | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a batch's tensors with their paths in it: "inputs", "batch['pixels'][0]"."""
    if names is not None:
        for name, item in zip(names, value, strict=True):
            yield from _within(item, name)
    else:
        yield from _within(value, "batch")


def _within(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    for key, item in items_in(value):
        yield from _within(item, f"{path}[{key!r}]")


def _first_module(task: Task, model: nn.Module, batch: Any, seed: int) -> str:
    """Name the first module that returns inf or NaN, "" where none does."""
    found: list[str] = []

    def look(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if not found and not _all_finite(outputs):
                found.append(f"{path or 'the root'} ({type(module).__name__})")

        return hook

    handles = [m.register_forward_hook(look(path)) for path, m in model.named_modules()]
    seed_everything(seed)
    try:
        with buffers_preserved(model):
            compute_loss(task, model, batch, None)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


def _all_finite(value: Any) -> bool:
    floats = (t for t in tensors_in(value) if t.is_floating_point() or t.is_complex())
    return all(bool(t.isfinite().all()) for t in floats)
