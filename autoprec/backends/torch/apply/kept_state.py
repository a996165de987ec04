"""State outside of registered buffers as it was before a step, put back if that is skipped.

What the model itself holds goes back whole: tensors and numbers in attributes, lists and dicts, so
that a queue and the number that says where it goes on agree. Of what else is at hand (a loss,
another network) only what is no longer finite does, for other steps may have changed the rest
meanwhile.

Much state is made by the first forward pass. So everything is searched when the profile is applied
and after the first update, which tells state from constants; from then on only places that changed
are followed, and a model without any pays nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.held_state import (
    Holder,
    Root,
    State,
    code_of,
    differ,
    find_holders,
    hooks_of,
    is_array,
    state_in_sight,
)
from autoprec.backends.torch.apply.tensor_copies import (
    Kept,
    TensorCopies,
    fill_nonfinite,
    put_back,
    replace_nonfinite,
)


@dataclass(frozen=True)
class _Place:
    """A holder, what it held before the step, and whether the model itself leads to it."""

    holder: Holder
    own: bool
    state: State
    containers: Mapping[Any, Any]

    @classmethod
    def now(cls, holder: Holder, own: bool) -> _Place:
        """Return a holder with what it holds now."""
        return cls(holder, own, holder.take(), holder.containers() if own else {})


class KeptState:
    """What `root` and the code around it hold outside of registered buffers."""

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        self._others: list[tuple[str, Callable[[], Any]]] = []
        self._places: list[_Place] = []
        self._copies, self._buffers = TensorCopies(), TensorCopies()
        self._owners: list[dict[str, torch.Tensor | None]] = []  # of buffers, not the model's own
        self._looked = self._updated = False
        self._add([*code_of(root), *state_in_sight([root])])

    @property
    def keeps(self) -> bool:
        """Return whether there is anything to be copied or searched before a step."""
        return not self._updated or bool(self._places or self._owners)

    def note_loss(self, loss_fn: Any) -> None:
        """Search a loss, too, if it is called in the first step."""
        if not (self._looked or isinstance(loss_fn, nn.Module)):
            self._others.append((getattr(loss_fn, "__name__", "loss"), lambda: loss_fn))
        elif not self._looked:
            self._add([("loss", loss_fn)])

    def look_around(self) -> None:
        """Search, once, what the training loop has at hand where it goes backward."""
        root = self._root()
        if self._looked or root is None:
            return
        self._looked = True
        known = [other for _, get in self._others if isinstance(other := get(), nn.Module)]
        self._add(state_in_sight([root, *known]))

    def _add(self, roots: list[Root]) -> None:
        self._others += [(name, weakref.ref(each)) for name, each in roots]

    def save(self) -> None:
        """Copy the state; before the first update, also what was made since the last search."""
        if not self.keeps:
            return
        if not self._updated:
            self._search()
        self._buffers.follow_buffers(self._owners)
        self._buffers.take()
        if not self._places:
            return
        self._places = [_Place.now(place.holder, place.own) for place in self._places]
        found = self._tensors()
        known = self._copies.kept
        if [id(each.tensor) for each in known] != [id(each.tensor) for each in found]:
            self._copies.follow(found)
        self._copies.take()

    def _search(self) -> None:
        """List the places anew."""
        root = self._root()
        if root is None:
            return
        others = [(name, value) for name, get in self._others if (value := get()) is not None]
        others += hooks_of(root)
        found = [
            (holder, own)
            for own, roots in ((True, [("", root)]), (False, others))
            for holder in find_holders(roots, registered=[root])
        ]
        self._owners = [holder.held for holder, _ in found if holder.registered]
        self._places = [_Place.now(*each) for each in found if not each[0].registered]

    def _tensors(self) -> list[Kept]:
        """List the tensors of all places, but those that share the memory of parameters."""
        root = self._root()
        if root is None or not any(True for p in self._places for _ in p.holder.tensors(p.state)):
            return []
        weights = {_memory(parameter) for parameter in root.parameters()}
        found: dict[int, Kept] = {}
        for index, place in enumerate(self._places):
            for name, tensor in place.holder.tensors(place.state):
                if id(tensor) not in found and _memory(tensor) not in weights:
                    in_list = isinstance(place.state, list)
                    kept = Kept(_NOWHERE, f"{index} {name}", tensor, by_version=in_list)
                    found[id(tensor)] = kept
        return list(found.values())

    def after_skip(self, *, all_of_it: bool) -> None:
        """Put back what the step changed, or what is not finite."""
        for kept in self._buffers.kept:
            replace_nonfinite(kept)
        copies = {id(each.tensor): each for each in self._copies.kept}
        for place in self._places:
            if all_of_it and place.own:
                for _, tensor in place.holder.tensors(place.state):
                    if id(tensor) in copies:
                        put_back(copies[id(tensor)])
                place.holder.put(place.state)
                place.holder.put_containers(place.containers)
            else:
                _put_back_nonfinite(place, copies)

    def after_update(self, *, stepped: bool) -> None:
        """Note which large tensors the step changed; after the first one, where there is state."""
        self._copies.after_update()
        self._buffers.after_update()
        if not self._updated:
            before = {place.holder.identity: place for place in self._places}
            copies = {id(each.tensor): each for each in self._copies.kept}
            self._search()
            self._updated = stepped
            if stepped:
                self._places = [
                    place
                    for place in self._places
                    if _has_changed(place, before.get(place.holder.identity), copies)
                ]

    def forget(self) -> None:
        """Drop all copies."""
        self._places, self._others, self._owners = [], [], []
        self._copies, self._buffers = TensorCopies(), TensorCopies()
        self._looked = self._updated = True


_NOWHERE: dict[str, torch.Tensor | None] = {}


def _has_changed(place: _Place, before: _Place | None, copies: dict[int, Kept]) -> bool:
    """Say whether the first step changed what a place holds, or whether it may be filled."""
    state = place.state
    if before is None or len(state) != len(before.state) or (isinstance(state, list) and not state):
        return True
    if any(before.containers.get(key) is not each for key, each in place.containers.items()):
        return True
    known = dict(before.holder.tensors(before.state))
    for name, tensor in place.holder.tensors(state):
        kept = copies.get(id(tensor))
        if tensor is not known.get(name) or kept is None:
            return True
        if kept.changes if kept.copy is None else not torch.equal(tensor, kept.copy):
            return True
    if isinstance(state, dict) and isinstance(before.state, dict):
        pairs = [(value, before.state.get(key)) for key, value in state.items()]
    else:
        pairs = list(zip(state, before.state, strict=True))
    return any(
        differ(value, earlier)
        for value, earlier in pairs
        if not isinstance(value, torch.Tensor | str)
    )


def _put_back_nonfinite(place: _Place, copies: dict[int, Kept]) -> None:
    now = place.holder.take()
    before = dict(place.holder.tensors(place.state))
    for name, tensor in place.holder.tensors(now):
        known = before.get(name)
        if known is not None:
            kept = copies.get(id(known))
            fill_nonfinite(tensor, known if kept is None or kept.copy is None else kept.copy)
    if isinstance(now, dict) and isinstance(place.state, dict):
        for key, value in now.items():
            old = place.state.get(key)
            if isinstance(value, float) and isinstance(old, float) and not math.isfinite(value):
                place.holder.held[key] = old
            elif old is not None and is_array(value) and is_array(old) and value.shape == old.shape:
                _fill_array(value, old, place.holder.held[key])
            elif place.holder.is_open and key not in place.state and not _is_finite(value):
                del place.holder.held[key]  # made by the step: so it is made again


def _fill_array(now: Any, before: Any, held: Any) -> None:
    """Give what is not finite in an array its numbers from before."""
    bad = ~(abs(now) < math.inf)
    if bad.any() and held.flags.writeable:
        held[bad] = before[bad]


def _is_finite(value: Any) -> bool:
    if is_array(value):
        return bool((abs(value) < math.inf).all())
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def _memory(tensor: torch.Tensor) -> int:
    """Return what two tensors have in common that share memory; another number for others."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # sparse ones and the like have no storage
        return id(tensor)
