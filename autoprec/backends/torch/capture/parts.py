"""A task of a model, its optimizer, a loader, and the step that computes the loss of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.capture.master_copy import MasterCopy
from autoprec.backends.torch.capture.rebatch import Batches, rebatch
from autoprec.errors import UsageError

_STEP = "step(model, batch) -> loss"


def from_parts(
    model: Any,
    optimizer: Any,
    loader: Any,
    step: Any,
    *,
    name: str,
    clip_grad_norm: float | None = None,
) -> Task:
    """Make a task of what a training loop consists of; `step(model, batch)` returns the loss.

    `loader` is a DataLoader, an iterable of batches, or a function of the batch size that returns
    one. Raises `UsageError` for what cannot be tuned, with the way out.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name}: the model is a {type(model).__name__}, expected an nn.Module")
    _check_step(name, model, step)
    return task_of_parts(
        name,
        MasterCopy(name, model, optimizer),
        rebatch(loader, name),
        step,
        clip_grad_norm=clip_grad_norm,
    )


def task_of_parts(
    name: str,
    master: MasterCopy,
    batches: Batches,
    step: Callable[[Any, Any], Any],
    *,
    accumulation: int = 1,
    clip_grad_norm: float | None = None,
    weigh: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
) -> Task:
    """Make a task of parts that were checked.

    Its batch is that of an update: the loader's times the `accumulation`. Where the loader fixes
    the batch it is the loader's.
    """
    micro = 1 if batches.fixed else accumulation
    return Task(
        name=name,
        build_model=master.build_model,
        build_data=batches.build,
        training_step=step,
        build_optimizer=master.build_optimizer,
        batch_size=None if batches.own is None else batches.own * micro,
        clip_grad_norm=clip_grad_norm or None,
        fixed_batch=batches.fixed,
        weigh=weigh,
    )


def _check_step(name: str, model: nn.Module, step: Any) -> None:
    """Raise `UsageError` for a step that cannot be called, or that uses the model itself."""
    if not callable(step):
        raise UsageError(f"{name}: the step is a {type(step).__name__}, expected {_STEP}")
    try:
        inspect.signature(step).bind(model, None)
    except TypeError as error:
        raise UsageError(f"{name}: the step cannot be called as {_STEP}: {error}") from error
    except ValueError:  # a function of C has no signature to look at
        return
    code = getattr(step, "__code__", None)
    if code is None:
        return
    try:
        seen = inspect.getclosurevars(step)
    except ValueError:  # a variable that has no value yet
        return
    for variable, value in {**seen.globals, **seen.nonlocals}.items():
        if value is model:
            raise UsageError(
                f"{name}: the step uses the variable {variable!r}, which is the model itself; "
                f"every trial trains a copy, so use the argument: def step(model, batch), and call "
                f"that model (line {code.co_firstlineno})"
            )
