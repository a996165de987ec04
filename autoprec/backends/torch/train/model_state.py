"""A model's float32 state at one moment: taken, put back, made noisy, and gradients compared.

Snapshots live in CPU memory and hold parameters, every buffer, persistent or not, and the state
that code keeps elsewhere (`held_state`). They are loaded in place: Parameter objects, hooks and
optimizers stay as they are. Of a model that ranks share each rank takes all of it, by the names it
has outside of its wrapper.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from autoprec.backends.shared.buffer_updates import MOST_VALUES
from autoprec.backends.shared.gradient_exponents import relative_error
from autoprec.backends.shared.trace_framework import NOISE
from autoprec.backends.torch.apply.held_state import Root
from autoprec.backends.torch.apply.model_changes import unwrap
from autoprec.backends.torch.distributed.sharding import part_like, reshard, whole
from autoprec.backends.torch.dtypes import LOW_DTYPES
from autoprec.backends.torch.train.held_snapshot import (
    Held,
    holders_of,
    map_state,
    put_held,
    take_held,
    tensors_in_held,
)

RELATIVE_NOISE = NOISE
"""Relative noise of the null."""


class Snapshot(dict[str, torch.Tensor]):
    """Copies of tensors by name; `held` are those that are neither parameter nor buffer, again.

    They are in the form that their holders have.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], held: Held) -> None:
        super().__init__(tensors)
        self.held = held


def _named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    own = unwrap(model)
    reshard(own)
    yield from own.named_parameters()
    yield from own.named_buffers()


def take_snapshot(model: nn.Module, others: Sequence[Root] = ()) -> Snapshot:
    """Copy the model's parameters, buffers and other state to the CPU, and that of `others`.

    These are what the task computes the loss with, each with a name.
    """
    found = list(holders_of(unwrap(model), others))
    held = take_held(found)
    tensors = {name: whole(t.detach()).to("cpu", copy=True) for name, t in _named_state(model)}
    return Snapshot(dict(tensors_in_held(found, held)) | tensors, held)


def size_in_bytes(model: nn.Module, others: Sequence[Root] = ()) -> int:
    """Return the bytes a snapshot of `model` takes."""
    held = tensors_in_held(holders_of(unwrap(model), others))
    return sum(t.numel() * t.element_size() for _, t in (*_named_state(model), *held))


@torch.no_grad()
def restore_snapshot(model: nn.Module, snapshot: Snapshot, others: Sequence[Root] = ()) -> None:
    """Load a snapshot in place."""
    for name, tensor in _named_state(model):
        kept = snapshot.get(name)
        if kept is None:
            continue
        if tensor.shape == kept.shape:
            tensor.copy_(part_like(kept, tensor))
        else:
            tensor.data = kept.to(device=tensor.device, dtype=tensor.dtype, copy=True)
    own = unwrap(model)
    device = next((p.device for p in own.parameters()), torch.device("cpu"))
    put_held(holders_of(own, others), snapshot.held, device)


def buffer_values(
    model: nn.Module,
    snapshot: Snapshot | None,
    others: Sequence[Root] = (),
    *,
    exact: bool = False,
) -> dict[str, torch.Tensor]:
    """Return a model's floating and complex buffers, or a snapshot's, as vectors of float64.

    With `exact`, those of whole numbers and truth values as well. Parameters that nothing trains
    may be what a buffer is: a codebook, a teacher's weights. So may what is neither, and what
    `others` hold.
    """
    own = unwrap(model)
    frozen = ((name, p) for name, p in own.named_parameters() if not p.requires_grad)
    held = tensors_in_held(holders_of(own, others))
    return {
        name: _vector(tensor if snapshot is None else snapshot[name])
        for name, tensor in (*held, *own.named_buffers(), *frozen)
        if snapshot is None or name in snapshot
        if exact or tensor.is_floating_point() or tensor.is_complex()
    }


def _vector(tensor: torch.Tensor) -> torch.Tensor:
    values = stored_values(tensor.detach()).reshape(-1)
    return values[:: 1 + values.numel() // MOST_VALUES].cpu().double()


def scale_buffers(snapshot: Snapshot, names: Collection[str], factor: float) -> Snapshot:
    """Return the snapshot with these buffers multiplied by a factor."""
    return _with(snapshot, {name: snapshot[name] * factor for name in names})


def low_held(model: nn.Module, others: Sequence[Root] = ()) -> dict[str, torch.dtype]:
    """Return the formats of what is kept in 16 bits outside of parameters and buffers, by name."""
    held = tensors_in_held(holders_of(unwrap(model), others))
    return {name: tensor.dtype for name, tensor in held if tensor.dtype in LOW_DTYPES}


def in_formats(snapshot: Snapshot, formats: Mapping[str, torch.dtype]) -> Snapshot:
    """Return the snapshot with floating-point tensors in these formats, by name."""
    names = [name for name in formats if name in snapshot and snapshot[name].is_floating_point()]
    return _with(snapshot, {name: snapshot[name].to(formats[name]) for name in names})


def _with(snapshot: Snapshot, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
    """Return the snapshot with other tensors, wherever it holds those of their names."""
    changed = {id(snapshot[name]): tensor for name, tensor in tensors.items()}
    held = {
        name: map_state(lambda tensor: changed.get(id(tensor), tensor), state)
        for name, state in snapshot.held.items()
    }
    return Snapshot({name: changed.get(id(t), t) for name, t in snapshot.items()}, held)


@torch.no_grad()
def add_noise(model: nn.Module, seed: int, size: float = RELATIVE_NOISE) -> None:
    """Multiply every weight by 1 + uniform(-size, size), drawn on the CPU from `seed`."""
    generator = torch.Generator("cpu").manual_seed(seed)
    reshard(model)
    for parameter in unwrap(model).parameters():
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        noise = torch.rand(parameter.shape, generator=generator, device="cpu")
        noise = noise.mul_(2).sub_(1).mul_(size)
        parameter.mul_(part_like(noise.add_(1), parameter))


def gradients(model: nn.Module, divisor: float = 1.0) -> dict[str, torch.Tensor]:
    """Copy the gradients to the CPU, divided by the loss scale; absent ones are left out."""
    return {
        name: _to_full_precision(whole(parameter.grad.detach()).cpu()) / divisor
        for name, parameter in unwrap(model).named_parameters()
        if parameter.grad is not None
    }


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the trained weights to the CPU, in full precision."""
    reshard(model)
    return {
        name: _to_full_precision(whole(parameter.detach()).to("cpu", copy=True))
        for name, parameter in unwrap(model).named_parameters()
        if parameter.requires_grad
    }


def _to_full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Cast to float32, or to the complex dtype of two of them."""
    return tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)


def gradient_error(
    candidate: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> float | None:
    """Return ||g - g32|| / ||g32|| over all parameters, None where it is not finite."""
    difference = total = 0.0
    for name in {*candidate, *reference}:
        ours, theirs = candidate.get(name), reference.get(name)
        if theirs is not None:
            total += _square(theirs)
        if ours is not None and theirs is not None:
            difference += _square(ours - theirs)
        else:
            difference += _square(ours if ours is not None else theirs)
    return relative_error(difference, total)


def stored_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the real numbers a gradient holds.

    Of a sparse one those are the elements or rows that are not zero, of a complex one both parts.
    """
    values = gradient.coalesce() if gradient.is_sparse else gradient
    if values.layout is not torch.strided or values.is_nested:
        values = values.values()
    return torch.view_as_real(values) if values.is_complex() else values


def _square(tensor: torch.Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0:
        return 0.0
    return float(torch.linalg.vector_norm(stored_values(tensor), dtype=torch.float64)) ** 2
