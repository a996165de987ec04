"""A model's buffers as they were before a step, put back where the loss scaler skips the step.

A float16 forward pass that overflows writes infinities into running means, variances and averages
before anybody knows. Its update is skipped, but a running average stays infinite for good.

All buffers of the step go back, not only those that are no longer finite: an average and the count
it is divided by belong together, and so do a table and the flag that says it was initialised. So
`num_batches_tracked` does not count a skipped step.

Whether a step is skipped is known after its backward pass, so what was there must be copied before
its first forward pass. A copy costs a launch or two for all small buffers of one dtype, and waits
for nothing. Version counters cannot say which buffers change: batch norms and `buffer.data` do not
move them. They are only asked of large buffers (masks, tables, queues), which are copied if they
changed during an earlier step; in the first step all are.

What is no buffer of the model cannot be seen: a tensor in a plain attribute, a loss's own buffers.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_LARGE = 2**20  # bytes; the running statistics of any batch norm are smaller


@dataclass(slots=True)
class _Kept:
    """One buffer, where its module holds it, and a copy of what was in it."""

    owner: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor | None
    copy: torch.Tensor | None = None
    version: int = -1
    changes: bool = True  # of a large one: whether the first step, or one since, changed it


class KeptBuffers:
    """Copies the buffers of `root` before a step, and puts them back if it is skipped.

    A step begins with the first forward pass since the last update: `before_forward` is told by
    `Precision.autocast`, and by the model where other code opens autocast. Where neither saw a
    forward pass before the loss was scaled (parts called by hand, or torch.compile around the
    model, under an autocast of the loop's own), the copies are those of the last update. What the
    loop itself did since then must not be lost, so only elements that are not finite go back.
    """

    def __init__(self, root: nn.Module, device_type: str) -> None:
        self._root, self._device_type = weakref.ref(root), device_type
        self._owners = [_buffers_of(module) for module in root.modules()]
        self._kept: list[_Kept] = []
        self._large: list[_Kept] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._updated = False
        #: Set by the first forward or backward pass since the last update.
        self.in_step = self._saw_forward = False
        self._save()
        _KEPT.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptBuffers:
        """Return this one; `before_called` tells the copied model from its own."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing of it in a model that is saved."""
        return type(None), ()

    def forget(self) -> None:
        """Drop the copies, and hear no more of the model's forward passes."""
        _KEPT.discard(self)
        self._owners, self._kept, self._large, self._groups = [], [], [], []

    def before_forward(self) -> None:
        """Copy the buffers if the forward pass to come is a step's first one."""
        if self.in_step or not torch.is_grad_enabled():
            return
        if self._kept or any(self._owners):
            if _is_traced():
                return
            self._save()
        self.in_step = self._saw_forward = True

    def before_called(self, model: nn.Module) -> None:
        """Do so where `model` is its own and under autocast, as it is in training."""
        if self._root() is model and torch.is_autocast_enabled(self._device_type):
            self.before_forward()

    def after_skip(self) -> None:
        """Put back what the step's forward passes changed.

        Other models may have taken part (a GAN's, each with a profile of its own). What else they
        did since their last update is not this step's, so only what is not finite goes back there.
        """
        with torch.no_grad():
            for each in list(_KEPT):
                all_of_it = each is self and self._saw_forward
                for kept in each._kept:
                    (_put_back if all_of_it else _replace_nonfinite)(kept)

    def after_update(self) -> None:
        """End the step: the next forward pass belongs to another one."""
        for kept in self._large:
            assert kept.tensor is not None
            if kept.tensor._version != kept.version:
                kept.changes = True
            elif not self._updated:
                kept.changes, kept.copy = False, None
        self._updated = True
        if not self._saw_forward:
            self._save()
        self.in_step = self._saw_forward = False

    def _save(self) -> None:
        if len(self._kept) != sum(map(len, self._owners)) or self._replaced():
            self._find()
        if not (self._groups or self._large):
            return
        with torch.no_grad():
            for copies, tensors in self._groups:
                torch._foreach_copy_(copies, tensors)
            for kept in self._large:
                _save_large(kept)

    def _replaced(self) -> bool:
        return any(kept.owner.get(kept.name) is not kept.tensor for kept in self._kept)

    def _find(self) -> None:
        """List the buffers anew; other code may register and replace them."""
        before = {(id(kept.owner), kept.name): kept for kept in self._kept}
        found = [(owner, name) for owner in self._owners for name in owner]
        self._kept, self._large = [], []
        groups: dict[tuple[torch.device, torch.dtype], list[_Kept]] = {}
        for owner, name in found:
            tensor, old = owner[name], before.get((id(owner), name))
            if old is None or old.tensor is not tensor:
                copy = None if old is None else old.copy
                old = _Kept(owner, name, tensor, copy, changes=old is None or old.changes)
            self._kept.append(old)
            if tensor is None or not _can_be_copied(tensor):
                old.copy = None
            elif tensor.numel() * tensor.element_size() > _LARGE:
                self._large.append(old)
            else:
                old.copy = _like(tensor, old.copy)
                groups.setdefault((tensor.device, tensor.dtype), []).append(old)
        self._groups = [
            ([kept.copy for kept in group], [kept.tensor for kept in group])  # type: ignore[misc]
            for group in groups.values()
        ]


_KEPT: weakref.WeakSet[KeptBuffers] = weakref.WeakSet()


def _buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return where a module holds its buffers; of a scripted one, which has no dict, a copy.

    Scripted code that sets another tensor in place of a buffer is not followed.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return dict(module.named_buffers(recurse=False))
    return module._buffers


def _is_traced() -> bool:
    """Return whether other code takes down what runs: no copy of ours may become part of that."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch.is_inference_mode_enabled()
        or torch._C._functorch.maybe_current_level() is not None
    )


def _can_be_copied(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be copied and written in place; others are only set back."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_inference() or tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        and torch._debug_has_internal_overlap(tensor) != 1  # expanded: nothing can write to it
    )


def _like(tensor: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
    """Return room for a copy: the one there is, if it fits."""
    if (
        copy is not None
        and copy.shape == tensor.shape
        and (copy.dtype, copy.device) == (tensor.dtype, tensor.device)
    ):
        return copy
    return torch.empty_like(tensor, requires_grad=False)


def _save_large(kept: _Kept) -> None:
    assert kept.tensor is not None
    version = kept.tensor._version
    if kept.changes and (version != kept.version or kept.copy is None):
        kept.copy = _like(kept.tensor, kept.copy).copy_(kept.tensor)
    kept.version = version


def _put_back(kept: _Kept) -> None:
    """Give a buffer the value, and its module the tensor, from before the step.

    `.data` leaves the version counter alone, by which autograd knows that a graph's tensors are
    still what they were: constants are, and the graph of a skipped step is not used again.
    """
    tensor, copy = kept.tensor, kept.copy
    if tensor is not None and copy is not None:
        if tensor.shape == copy.shape:
            tensor.data.copy_(copy)
        else:
            tensor.data = copy.clone()
    if kept.name in kept.owner and kept.owner[kept.name] is not tensor:
        kept.owner[kept.name] = tensor


def _replace_nonfinite(kept: _Kept) -> None:
    """Give the elements of a buffer that are not finite their values of the last update."""
    tensor, copy = kept.owner.get(kept.name), kept.copy
    if tensor is None or copy is None or tensor.shape != copy.shape:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.copy_(torch.where(tensor.isfinite(), tensor, copy))
