"""Casting what a model returns up to float32, whatever holds the tensors.

Containers, dataclasses, `torch.distributions`, `SimpleNamespace` and objects of people's own
classes are copied, shallowly, and the copies hold float32 tensors; what needs no change is returned
itself. So an object that the model keeps (`self.last_output`) stays as the model left it. Two
references to one object stay references to one object.

What cannot be copied so (a function's closure, a generator, a class without attributes to set) is
named once, in a warning.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from autoprec.backends.torch.apply.float32_distributions import derive_again
from autoprec.backends.torch.apply.held_objects import (
    MOST_HOLDERS,
    PRIMITIVES,
    Holder,
    Kind,
    Survey,
    held_by,
    kind_of,
    survey,
)
from autoprec.backends.torch.apply.nested_tensors import (
    holds_containers_only,
    in_full_precision,
    to_float32,
)
from autoprec.backends.torch.dtypes import FULL_DTYPES, dtype_name
from autoprec.errors import AutoprecWarning


def results_to_float32(value: Any, named: set[str], given: Iterable[Any] = ()) -> Any:
    """Return what a call returned, with every 16-bit tensor in it cast up to float32.

    `named` holds the classes that a warning has named already. Objects (not containers) that were
    `given` to the call stay themselves: modules change them in place.
    """
    if isinstance(value, torch.Tensor):
        return in_full_precision(value)
    if torch.compiler.is_compiling():
        if holds_containers_only(value):
            return to_float32(value)
        return _cast_uncompiled(value, named, given)
    if type(value) in (tuple, list, dict):
        low = _low_tensors_alone_in(value)
        if low == []:
            return value
        if low is not None and len(low) == len(set(low)):
            return to_float32(value)
    return _cast(value, named, given)


def _low_tensors_alone_in(value: Any) -> list[int] | None:
    """Return the ids of a container's 16-bit tensors; None where it holds more than tensors."""
    low = []
    for each in value.values() if type(value) is dict else value:
        if isinstance(each, torch.Tensor):
            if each.dtype in FULL_DTYPES:
                low.append(id(each))
        elif not isinstance(each, PRIMITIVES):
            return None
    return low


def _cast(value: Any, named: set[str], given: Iterable[Any]) -> Any:
    """Cast up what `value` holds, however deep."""
    kind = kind_of(type(value))
    if kind is Kind.LEAF:
        return value
    known: frozenset[int] = frozenset()
    if given:
        held = survey(list(given)).holders
        known = frozenset(ident for ident, each in held.items() if each.kind is Kind.OBJECT)
    seen = survey(value, known)
    if seen.unseen and "" not in named:
        named.add("")
        _warn(
            f"a model returned more than {MOST_HOLDERS} objects: 16-bit tensors in those beyond "
            "stay 16-bit. Return the tensors alone"
        )
    return _Copies(seen, named).of(value) if seen.changing else value


#: What looks through objects is not worth compiling: torch.compile calls it as it is.
_cast_uncompiled = _disable_dynamo(_cast)


class _Copies:
    """Copies of the holders that change, and of their tensors, by the ids of the originals."""

    def __init__(self, seen: Survey, named: set[str]) -> None:
        self._holders, self._changing, self._named = seen.holders, seen.changing, named
        self._new: dict[int, Any] = {}
        changing = [seen.holders[ident] for ident in seen.changing]
        open_ones = [each for each in changing if each.kind is not Kind.FIXED]
        for holder in open_ones:
            self._new[id(holder.value)] = self._copy(holder)
        for holder in open_ones:
            if self._new[id(holder.value)] is not holder.value:
                self._fill(self._new[id(holder.value)], holder)
        for holder in open_ones:
            derive_again(holder.value, self._new[id(holder.value)])

    def of(self, value: Any) -> Any:
        """Return the copy of a holder or a tensor, or itself where it does not change."""
        if id(value) in self._new:
            return self._new[id(value)]
        if isinstance(value, torch.Tensor):
            if value.dtype in FULL_DTYPES:
                self._new[id(value)] = in_full_precision(value)
            return self._new.get(id(value), value)
        if id(value) not in self._changing:
            return value
        self._new[id(value)] = made = self._make(self._holders[id(value)])
        return made

    def _copy(self, holder: Holder) -> Any:
        """Return a shallow copy to be filled; the original, named, where there is none."""
        value = holder.value
        if holder.kind is Kind.ARRAY:
            return value.copy()  # in C's order, in which its items are counted
        if holder.kind is not Kind.CLOSED:
            for copied in (copy.copy, _with_its_attributes):
                try:
                    made = copied(value)
                except Exception:  # noqa: S112 (whatever the class's own code raises)
                    continue
                if made is not value and type(made) is type(value):
                    if getattr(value, "__dict__", None) is value:  # a dict that is its attributes
                        object.__setattr__(made, "__dict__", made)
                    return made
        self._name(holder)
        return value

    def _make(self, holder: Holder) -> Any:
        """Return a tuple, a set or a read-only mapping with what it now holds."""
        value, cls = holder.value, type(holder.value)
        items = [self.of(each) for is_attribute, _, each in holder.held if not is_attribute]
        try:
            if isinstance(value, types.MappingProxyType):
                return types.MappingProxyType(dict(zip(value, items, strict=True)))
            if not isinstance(value, tuple) or hasattr(cls, "n_sequence_fields"):
                made = cls(items)
            else:
                made = tuple.__new__(cls, items)
        except Exception:
            self._name(holder)
            return value
        for is_attribute, name, each in holder.held:
            if is_attribute:
                self._set(made, is_attribute, name, self.of(each), holder)
        return made

    def _fill(self, made: Any, holder: Holder) -> None:
        for is_attribute, key, each in holder.held:
            new = self.of(each)
            if new is not each:
                self._set(made, is_attribute, key, new, holder)

    def _set(self, made: Any, is_attribute: bool, key: Any, new: Any, holder: Holder) -> None:
        """Set it past the class's own `__setattr__` and `__setitem__`: those may be frozen."""
        try:
            if isinstance(made, dict) and not is_attribute:
                dict.__setitem__(made, key, new)
            elif isinstance(made, list) and not is_attribute:
                list.__setitem__(made, key, new)
            elif not is_attribute and holder.kind is Kind.ARRAY:
                made.reshape(-1)[key] = new
            elif not is_attribute:
                made[key] = new
            elif key in getattr(made, "__dict__", ()):
                made.__dict__[key] = new
            else:
                object.__setattr__(made, key, new)
        except Exception:
            self._name(holder)

    def _name(self, holder: Holder) -> None:
        cls = type(holder.value)
        name = cls.__qualname__ if cls.__module__ == "builtins" else _full_name(cls)
        if name in self._named:
            return
        self._named.add(name)
        dtype = dtype_name(self._changing[id(holder.value)])
        _warn(
            f"a model returned a {name} with a {dtype} tensor in it that cannot be replaced by a "
            f"float32 one, so it leaves in {dtype}: cast the tensor in the model's forward, with "
            ".float(), or return it in a tuple, a dict or a dataclass"
        )


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _with_its_attributes(value: Any) -> Any:
    """Copy an object whose class cannot be copied in its own way."""
    made = object.__new__(type(value))
    for is_attribute, name, each in held_by(value, Kind.OBJECT):
        if is_attribute and name in getattr(value, "__dict__", ()):
            made.__dict__[name] = each
        elif is_attribute:
            object.__setattr__(made, name, each)
    return made


def _warn(text: str) -> None:
    warnings.warn(
        f"{text}. To silence: filter autoprec.errors.AutoprecWarning",
        AutoprecWarning,
        stacklevel=2,
    )
