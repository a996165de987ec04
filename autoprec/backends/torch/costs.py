"""What a training step costs: its operations, and the bytes it keeps for the backward pass.

Both look into a step with hooks that some code does not bear: gradients by inputs, torch.func,
nested tensors. That is no fault of the task; what cannot be measured is unknown.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from autoprec.backends.base import Task
from autoprec.backends.torch.flops import by_module, counter
from autoprec.backends.torch.running import compute_loss, seed_everything

Result = TypeVar("Result")


def attempt(measure: Callable[[], Result]) -> tuple[Result | None, str]:
    """Return what `measure` gives, or None and why it failed: out of memory is a reason too."""
    try:
        return measure(), ""
    except Exception as error:
        why = _reason(error)
    gc.collect()  # what the failed pass held
    return None, why


def _reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text
    return "there is not enough memory for it" if full else text


def operations(task: Task, model: nn.Module, batch: Any, seed: int) -> dict[str, int]:
    """Count operations by module in one forward and backward pass.

    Where torch cannot tell the modules apart they are all the root's own, "".
    """
    own, _ = attempt(lambda: _count(task, model, batch, seed, tracked=True))
    if own is None:
        own, _ = attempt(lambda: _count(task, model, batch, seed, tracked=False))
    return own or {}


def _count(task: Task, model: nn.Module, batch: Any, seed: int, *, tracked: bool) -> dict[str, int]:
    mode = counter(by_module=tracked)
    with mode:
        passed(task, model, batch, seed)
    return by_module(mode, model) if tracked else {"": mode.get_total_flops()}


def saved_bytes(task: Task, model: nn.Module, batch: Any, seed: int) -> int:
    """Count the bytes a forward pass keeps for the backward pass; weights are not among them."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse: it has no storage
            storage = tensor.untyped_storage()
            place, size = storage.data_ptr(), tensor.numel() * tensor.element_size()
            if place not in weights:  # a batch may be a slice of all the data, or one row repeated
                kept[place] = max(kept.get(place, 0), min(size, storage.nbytes()))
        return tensor.detach()  # an output that kept itself would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        passed(task, model, batch, seed)
    return sum(kept.values())


def passed(task: Task, model: nn.Module, batch: Any, seed: int) -> None:
    """Run one forward and backward pass that leaves no trace in the model."""
    seed_everything(seed)
    try:
        with untouched(model):
            compute_loss(task, model, batch, None).backward()  # type: ignore[no-untyped-call]
    finally:
        model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put buffers (BatchNorm's statistics, counters) back as they were."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in kept and kept[name].shape == buffer.shape:
                    buffer.copy_(kept[name])
