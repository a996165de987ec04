"""How a torch task is run, wherever it is run: seeding, data, optimizer, loss.

Timing sessions and numerical traces share these mechanics, so that both train exactly what the
user trains. Nothing here measures, decides or catches the user's own exceptions; what the task
file got wrong is a `TaskError` that names the function and the fix.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from autoprec.backends.base import Task
from autoprec.backends.torch.rng import RngState, seed_everything
from autoprec.errors import TaskError

__all__ = [
    "Autocasting",
    "batches",
    "build_model",
    "build_optimizer",
    "compute_loss",
    "count_samples",
    "materialize",
    "move",
    "seed_everything",
]

DEFAULT_LEARNING_RATE = 1e-3


class Autocasting(Protocol):
    """What `compute_loss` needs of a Precision object."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context the forward pass and the loss run in."""


def move(value: Any, device: str | torch.device) -> Any:
    """Return `value` with every tensor in it on `device`.

    Mappings, lists, tuples, named tuples and dataclasses are rebuilt; objects with a `to` method
    (packed sequences, tokenizer batches, graphs) move themselves; everything else passes through.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, str | bytes | int | float | None):
        return value
    if not isinstance(value, type) and callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, Mapping):
        items = {key: move(item, device) for key, item in value.items()}
        return items if type(value) is dict else _refill(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(move(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(clone, field.name, move(getattr(value, field.name), device))
        return clone
    return value


def _refill(value: Any, items: dict[Any, Any]) -> Any:
    clone = copy.copy(value)
    for key, item in items.items():
        clone[key] = item
    return clone


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors nested in `value`, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, str | bytes | int | float | None):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        for item in vars(value).values():
            yield from tensors_in(item)


def count_samples(batch: Any) -> int:
    """Return the leading dimension of the first tensor in `batch`; `TaskError` if there is none.

    A packed sequence counts its sequences, not its time steps.
    """
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if isinstance(first, nn.utils.rnn.PackedSequence):
        return int(first.batch_sizes[0])
    for tensor in tensors_in(batch):
        if tensor.ndim > 0:
            return int(tensor.shape[0])
    raise TaskError(
        f"build_data: a batch of type {type(batch).__name__} without any tensor was given, "
        "expected tensors with the samples in their first dimension"
    )


def build_model(task: Task, device: str | torch.device, seed: int) -> nn.Module:
    """Build the user's model with all RNGs seeded, on `device`, in training mode."""
    seed_everything(seed)
    model = task.build_model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{task.name}: build_model returned {_kind(model)}, expected a torch.nn.Module; "
            "return the model from build_model"
        )
    return model.to(device).train()


def build_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Build the user's optimizer for `model`, AdamW(lr=1e-3) where the task has none."""
    if task.build_optimizer is None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            raise TaskError(
                f"{task.name}: build_model returned a model without trainable parameters; "
                "there is nothing to train"
            )
        return torch.optim.AdamW(trainable, lr=DEFAULT_LEARNING_RATE)
    optimizer = task.build_optimizer(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"{task.name}: build_optimizer returned {_kind(optimizer)}, expected a "
            "torch.optim.Optimizer; return one optimizer made from model.parameters()"
        )
    return optimizer


def batches(
    task: Task, batch_size: int, seed: int, *, repeat: bool = False
) -> Generator[Any, None, None]:
    """Yield the user's batches, on the CPU or wherever `build_data` puts them.

    All RNGs are seeded before `build_data`, and data are drawn from an RNG stream of their own:
    what training consumes (dropout) does not change what the next batch is. With `repeat` the data
    start again at their end (a generator that is used up is built anew). Worker processes of a
    DataLoader end when the iterator is closed. Raises `TaskError` where there is nothing to
    train on.
    """
    outside = RngState.capture()
    seed_everything(seed)
    try:
        data = task.build_data(batch_size)
        inside = RngState.capture()
    finally:
        outside.restore()
    iterator: Any = None
    try:
        while True:
            with inside.swapped():
                iterator = _iterate(task, data)
            count = 0
            while True:
                with inside.swapped():
                    batch = next(iterator, _END)
                if batch is _END:
                    break
                _check_batch(task, batch)
                count += 1
                yield batch
            _close(iterator)
            if count == 0:
                raise TaskError(
                    f"{task.name}: build_data({batch_size}) yielded no batches; expected at least "
                    "one. Is the data set smaller than the batch, with drop_last=True?"
                )
            if not repeat:
                return
            if _is_one_shot(data):
                with inside.swapped():
                    data = task.build_data(batch_size)
    finally:
        _close(iterator)


_END = object()


def _is_one_shot(data: Any) -> bool:
    """Whether `data` can be gone through only once (a generator or another iterator)."""
    return hasattr(data, "__next__")


def _iterate(task: Task, data: Any) -> Iterator[Any]:
    if data is None or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise TaskError(
            f"{task.name}: build_data returned {_kind(data)}, expected an iterable of batches: "
            "a DataLoader, a generator or a list of (inputs, targets)"
        )
    return iter(data)


def _check_batch(task: Task, batch: Any) -> None:
    if task.training_step is not None:
        return
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        size = f" of {len(batch)} items" if isinstance(batch, list | tuple) else ""
        raise TaskError(
            f"{task.name}: build_data yielded {_kind(batch)}{size}, expected (inputs, targets); "
            "for any other form define training_step(model, batch) -> loss instead of loss_fn"
        )


def _close(iterator: Any) -> None:
    """End the worker processes or the generator behind a data iterator."""
    for name in ("_shutdown_workers", "close"):
        end = getattr(iterator, name, None)
        if callable(end):
            with contextlib.suppress(Exception):
                end()


def materialize(task: Task, model: nn.Module, batch: Any, seed: int) -> None:
    """Run one forward pass without gradients if `model` has lazy parameters still to be made."""
    lazy = any(nn.parameter.is_lazy(p) for p in (*model.parameters(), *model.buffers()))
    if lazy:
        seed_everything(seed)
        with torch.no_grad():
            compute_loss(task, model, batch, None)


def compute_loss(
    task: Task, model: nn.Module, batch: Any, precision: Autocasting | None
) -> torch.Tensor:
    """Return the loss of one batch as a float32 scalar, computed as the user's loop would.

    The batch must be on the model's device. A loss that is not finite is returned as it is; one
    that is not a scalar, or that no gradient can flow from, is a `TaskError`.
    """
    with contextlib.nullcontext() if precision is None else precision.autocast():
        if task.training_step is not None:
            name, loss = "training_step", task.training_step(model, batch)
        elif task.loss_fn is not None:
            inputs, targets = batch
            name, loss = "loss_fn", task.loss_fn(model(inputs), targets)
        else:
            raise TaskError(
                f"{task.name}: neither loss_fn(outputs, targets) nor training_step(model, batch) "
                "is defined; define one of them"
            )
    return _scalar(task, name, loss)


def _scalar(task: Task, name: str, loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise TaskError(f"{task.name}: {name} returned {_kind(loss)}, expected a scalar tensor")
    if loss.numel() != 1:
        raise TaskError(
            f"{task.name}: {name} returned a tensor of shape {tuple(loss.shape)}, expected a "
            "scalar; average it with .mean()"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise TaskError(
            f"{task.name}: {name} returned a loss without a gradient, expected one that depends "
            "on the model's parameters; is it detached, or made with .item()?"
        )
    return loss.float().reshape(())


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
