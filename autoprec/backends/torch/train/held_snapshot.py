"""State outside of parameters and registered buffers, copied to the CPU and put back.

A copy taken of one build of a model can be put into another one, by the names of what holds it.
Tensors are written in place where there is one of the same shape, for others may share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.apply.held_state import Holder, Root, State, code_of, find_holders
from autoprec.backends.torch.apply.model_changes import unwrap
from autoprec.backends.torch.apply.tensor_copies import can_be_copied
from autoprec.backends.torch.train.rng import is_generator

Held = Mapping[str, State]


def around(task: Task) -> list[Root]:
    """Name what a task computes its loss with, besides the model."""
    known = {"loss_fn": task.loss_fn, "training_step": task.training_step}
    return [(name, value) for name, value in known.items() if value is not None]


def holders_of(model: nn.Module, others: Sequence[Root]) -> Iterator[tuple[str, Holder]]:
    """Yield the holders of a model, and of functions and losses around it, each by one name."""
    seen: Counter[str] = Counter()
    for holder in find_holders([("", model), *others, *code_of(model)], registered=[model]):
        seen[holder.name] += 1
        yield f"{holder.name} {seen[holder.name]}", holder


def holders_around(model: nn.Module, others: Sequence[Root]) -> list[tuple[str, Holder]]:
    """List those holders that all builds of the model share: the task's file has them."""
    own = {holder.identity for holder in find_holders([("", model)], registered=[model])}
    found = holders_of(model, others)
    return [(name, holder) for name, holder in found if holder.identity not in own]


def held_generators(model: nn.Module, others: Sequence[Root]) -> list[Any]:
    """List the generators of random numbers that a model holds, or functions and losses around it.

    They are in attributes, in containers there, and in variables that the code names.
    """
    held = [value for module in unwrap(model).modules() for value in vars(module).values()]
    for _, holder in holders_of(model, others):
        values = holder.held.values() if isinstance(holder.held, Mapping) else holder.held
        for value in values:
            held += value if isinstance(value, list | tuple) else [value]
    return list({id(value): value for value in held if is_generator(value)}.values())


def take_held(holders: Iterable[tuple[str, Holder]]) -> Held:
    """Copy what holders hold to the CPU."""
    return {
        name: map_state(lambda t: t.detach().to("cpu", copy=True), holder.take())
        for name, holder in holders
    }


@torch.no_grad()
def put_held(holders: Iterable[tuple[str, Holder]], kept: Held, device: str | torch.device) -> None:
    """Put back what was copied, on the device; lists and dicts made since then are emptied."""
    for name, holder in holders:
        state, now = kept.get(name), holder.take()
        if state is not None:
            holder.put(_placed(state, now, device), whole=True)
        elif holder.is_container:
            holder.put(type(now)())


def tensors_in_held(
    holders: Iterable[tuple[str, Holder]], kept: Held | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that holders hold, or that were copied, each with its name."""
    for name, holder in holders:
        state = holder.take() if kept is None else kept.get(name, [])
        yield from holder.tensors(state)


def map_state(function: Callable[[torch.Tensor], torch.Tensor], state: State) -> State:
    """Apply a function to every tensor of a state."""
    if isinstance(state, list):
        return [_mapped(function, each) for each in state]
    return {key: _mapped(function, each) for key, each in state.items()}


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return function(value)
    if isinstance(value, tuple):
        items = [_mapped(function, each) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _placed(state: State, now: State, device: str | torch.device) -> State:
    """Return a state with its tensors on the device, in place of those that are there."""
    if isinstance(state, list):
        padded = [*now, *[None] * len(state)][: len(state)]
        return [_written(each, old, device) for each, old in zip(state, padded, strict=True)]
    known = now if isinstance(now, dict) else {}
    return {key: _written(each, known.get(key), device) for key, each in state.items()}


def _written(value: Any, there: Any, device: str | torch.device) -> Any:
    if isinstance(value, tuple):
        alike = isinstance(there, tuple) and len(there) == len(value)
        olds = there if alike else (None,) * len(value)
        items = [_written(each, old, device) for each, old in zip(value, olds, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if not isinstance(value, torch.Tensor):
        return value
    if (
        isinstance(there, torch.Tensor)
        and there.shape == value.shape
        and there.dtype == value.dtype
        and not there.requires_grad
        and can_be_copied(there)
    ):
        return there.copy_(value)
    return value.to(device, copy=True)
