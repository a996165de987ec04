"""Copies of tensors as they were before a step: taken in a launch or two, and put back in place.

Small tensors of one dtype are copied together. Large ones, and those `by_version`, are copied only
if an earlier step changed them in place, which their version counters say; at first all are.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_LARGE = 2**20  # bytes; the running statistics of any batch norm are smaller


@dataclass(slots=True)
class Kept:
    """One tensor, the place that holds it, and a copy of what was in it.

    The `owner` is empty where something else sees to it that the place holds the tensor again.
    """

    owner: MutableMapping[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor | None
    copy: torch.Tensor | None = None
    version: int = -1
    changes: bool = True  # of a large one: whether the first step, or one since, changed it
    by_version: bool = False


class TensorCopies:
    """Copies of the tensors in some places; `kept` lists them."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self.by_version: list[Kept] = []
        self._lazy: list[Kept] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._updated = False

    def follow(self, places: Iterable[Kept]) -> None:
        """Take these places instead of the ones there are; what is known of those goes on."""
        before = {_key(kept): kept for kept in self.kept}
        self.kept, self.by_version, self._lazy = [], [], []
        groups: dict[tuple[torch.device, torch.dtype], list[Kept]] = {}
        for kept in places:
            old = before.get(_key(kept))
            if old is not None:
                kept.copy, kept.changes = old.copy, old.changes
                if old.tensor is kept.tensor:
                    kept.version = old.version
            self.kept.append(kept)
            tensor = kept.tensor
            if tensor is None or not can_be_copied(tensor):
                kept.copy = None
                if tensor is not None and is_lazy(tensor):
                    self._lazy.append(kept)
            elif kept.by_version or tensor.numel() * tensor.element_size() > _LARGE:
                self.by_version.append(kept)
            else:
                kept.copy = _like(tensor, kept.copy)
                groups.setdefault((tensor.device, tensor.dtype), []).append(kept)
        self._groups = [
            ([kept.copy for kept in group], [kept.tensor for kept in group])  # type: ignore[misc]
            for group in groups.values()
        ]

    def follow_buffers(self, owners: Sequence[dict[str, torch.Tensor | None]]) -> None:
        """Follow the buffers of modules, which other code may register and replace."""
        replaced = any(kept.owner.get(kept.name) is not kept.tensor for kept in self.kept)
        if replaced or self.materialized or len(self.kept) != sum(map(len, owners)):
            self.follow(Kept(owner, name, owner[name]) for owner in owners for name in owner)

    @property
    def materialized(self) -> list[Kept]:
        """List what had no shape when it was followed, and has one now."""
        return [each for each in self._lazy if each.tensor is not None and not is_lazy(each.tensor)]

    def take(self) -> None:
        """Copy what changes."""
        if not (self._groups or self.by_version):
            return
        with torch.no_grad():
            for copies, tensors in self._groups:
                torch._foreach_copy_(copies, tensors)
            for kept in self.by_version:
                _copy_if_changed(kept)

    def after_update(self) -> None:
        """Drop the copies of what the first step left alone; note what this one changed."""
        for kept in self.by_version:
            assert kept.tensor is not None
            if kept.tensor._version != kept.version:
                kept.changes = True
            elif not self._updated:
                kept.changes, kept.copy = False, None
        self._updated = True


def _key(kept: Kept) -> tuple[int, str]:
    return id(kept.owner), kept.name


def can_be_copied(tensor: torch.Tensor) -> bool:
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


def _copy_if_changed(kept: Kept) -> None:
    assert kept.tensor is not None
    version = kept.tensor._version
    if kept.changes and (version != kept.version or kept.copy is None):
        kept.copy = _like(kept.tensor, kept.copy).copy_(kept.tensor)
    kept.version = version


def put_back(kept: Kept) -> None:
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


def replace_nonfinite(kept: Kept) -> None:
    """Give the elements of a buffer that are not finite their values of the last update."""
    fill_nonfinite(kept.owner.get(kept.name), kept.copy)


def fill_nonfinite(tensor: torch.Tensor | None, known: torch.Tensor | None) -> None:
    """Give the elements of a tensor that are not finite those of another one."""
    if tensor is None or known is None or tensor.shape != known.shape:
        return
    if (tensor.is_floating_point() or tensor.is_complex()) and can_be_copied(tensor):
        tensor.data.copy_(torch.where(tensor.isfinite(), tensor, known))
