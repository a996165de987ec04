"""Finds state that code keeps outside of parameters and registered buffers.

An average in a plain attribute, a queue in a list, the buffers of a loss, a hidden state in a
tuple: a forward pass changes them as it does BatchNorm's statistics, and no `state_dict` of the
model knows them. Looked into are the attributes of people's own modules and objects, lists and
dicts in them, and what a function is made of: closures, defaults, the global variables that it
names. Not looked into are optimizers, objects of libraries, large containers, and tensors too large
to be anything but data.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.calling_frames import is_library, variables_in_sight
from autoprec.backends.torch.apply.held_objects import (
    MOST_HOLDERS,
    PRIMITIVES,
    Kind,
    kind_of,
    slots_of,
)
from autoprec.backends.torch.apply.reached_variables import (
    ReachedVariables,
    attributes_of,
    cells_of,
    globals_of,
)

MOST_ITEMS = 1024
"""Containers with more items are data."""

MOST_BYTES = 2**26
"""Larger tensors are data as well, or weights."""

MOST_ARRAY_BYTES = 2**16
"""NumPy's arrays are copied in every step, so larger ones are data."""

IN_BRACKETS = "{}[{!r}]"
"""The form of names of items."""

_OF_MODULES = frozenset({*vars(nn.Module()), "forward", "_compiled_call_impl"})
_MISSING = object()

State = dict[Any, Any] | list[Any]
Root = tuple[str, Any]


@dataclass(frozen=True)
class Holder:
    """A mapping or a list that holds tensors, numbers, or tuples of them, by name.

    Of a module's or an object's attributes, and of a dict's items, only those are state. `is_open`
    says that items may be added and deleted; `numbers`, that numbers are state, too. `name` is
    where it is found, and `form` the way to what is in it.
    """

    name: str
    held: Any
    form: str = "{}.{}"
    is_open: bool = True
    numbers: bool = True
    registered: bool = False

    def take(self) -> State:
        """Return what it holds now, itself; tensors of a graph without that, NumPy's arrays copied.

        Those are written to in place, which nothing tells.
        """
        if not isinstance(self.held, MutableMapping):
            return [_detached(each) for each in self.held]
        return {k: _detached(each) for k, each in self.held.items() if self._is_state(k, each)}

    def put(self, state: State, *, whole: bool = False) -> None:
        """Let it hold again what it did.

        Without `whole` texts stay, in which trainers say what they are doing, and so do finite
        numbers where none were: the loop may read next what a forward pass left for it.
        """
        if isinstance(state, list):
            if len(state) != len(self.held) or any(map(differ, self.held, state)):
                self.held.clear()
                self.held.extend(map(_detached, state))
            return
        now = self.take()
        assert isinstance(now, dict)
        for key in [key for key in now if key not in state] if self.is_open else ():
            if whole or not _may_stay(now[key], None):
                del self.held[key]
        for key, value in state.items():
            found = self.held.get(key, _MISSING)
            if differ(found, value) and (whole or not _may_stay(found, value)):
                if not is_array(value):
                    self.held[key] = value
                elif is_array(found) and found.shape == value.shape and found.flags.writeable:
                    found[...] = value
                else:
                    self.held[key] = value.copy()

    def containers(self) -> dict[Any, Any]:
        """Return the lists, dicts and objects that it holds, but those of a graph's tensors."""
        if not isinstance(self.held, MutableMapping):
            return {}
        found = {key: value for key, value in self.held.items() if key not in _OF_MODULES}
        return {key: value for key, value in found.items() if _is_small_container(value)}

    def put_containers(self, containers: Mapping[Any, Any]) -> None:
        """Let it hold these again where code has replaced them by others."""
        for key, value in containers.items():
            if self.held.get(key) is not value:
                self.held[key] = value

    @property
    def is_container(self) -> bool:
        """Return whether it is a list or a dict of its own, rather than an object's attributes."""
        return self.form == IN_BRACKETS

    @property
    def identity(self) -> int:
        """Return a number by which another search finds the same holder."""
        return id(self.held.owner if isinstance(self.held, ReachedVariables) else self.held)

    def path(self, key: Any) -> str:
        """Name an item: "encoder.average", "queue[0]"."""
        return self.form.format(self.name, key).lstrip(".")

    def tensors(self, state: State) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in what it holds or held, each with its name."""
        for key, value in enumerate(state) if isinstance(state, list) else state.items():
            yield from _tensors(self.path(key), value)

    def _is_state(self, key: Any, value: Any) -> bool:
        if key in _OF_MODULES:
            return False
        known = _is_state(value)
        return known and (self.numbers or value is None or not isinstance(value, PRIMITIVES))


def find_holders(roots: Iterable[Root], *, registered: Iterable[nn.Module] = ()) -> list[Holder]:
    """List the holders that each root leads to, in the same order for the same objects.

    A root is a name with a module, an object or a function. The buffers of `registered` modules
    and of those below them are left out; those of other modules are held by these.
    """
    known = {id(module) for root in registered for module in root.modules()}
    return list(_Search(known).below(roots))


class _Search:
    """A walk through what roots hold; each object is looked into once."""

    def __init__(self, registered: set[int]) -> None:
        self._registered = registered
        self._seen: set[int] = set()

    def below(self, roots: Iterable[Root]) -> Iterator[Holder]:
        pending = list(roots)[::-1]
        while pending and len(self._seen) < MOST_HOLDERS:
            name, value = pending.pop()
            if isinstance(value, PRIMITIVES) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            for holder, inside in self._looked_into(name, value):
                pending += [*inside][::-1]
                if holder is not None:
                    yield holder

    def _looked_into(self, name: str, value: Any) -> Iterator[tuple[Holder | None, Iterable[Root]]]:
        """Yield holders and what else is to be looked into."""
        if isinstance(value, nn.Module):
            yield from self._module(name, value)
        elif isinstance(value, torch.Tensor):
            return
        elif isinstance(value, types.MethodType):
            yield None, [(name, value.__self__), (name, value.__func__)]
        elif isinstance(value, partial):
            parts = (value.func, *value.args, *value.keywords.values())
            yield None, [(name, part) for part in parts]
        elif isinstance(value, types.FunctionType):
            if not is_library(value.__code__.co_filename):
                for held, numbers in ((cells_of(value), True), (globals_of(value), False)):
                    holder = Holder("", held, is_open=False, numbers=numbers)
                    yield (holder if held else None), _inside(holder, held.items())
                yield None, [(name, each) for each in value.__defaults__ or ()]
        elif isinstance(value, type):
            if _is_peoples_own(value):
                names = [key for key, each in vars(value).items() if not callable(each)]
                held = attributes_of(value, (key for key in names if not key.startswith("__")))
                yield Holder(name, held, is_open=False, numbers=False), ()
                functions = [each for each in vars(value).values() if callable(each)]
                yield None, [(name, each) for each in functions if not isinstance(each, type)]
        else:
            yield from _container(name, value)

    def _module(self, name: str, root: nn.Module) -> Iterator[tuple[Holder | None, Iterable[Root]]]:
        for path, module in root.named_modules():
            if module is not root and id(module) in self._seen:
                continue
            self._seen.add(id(module))
            prefix = f"{name}.{path}".strip(".")
            if id(module) not in self._registered and module._buffers:
                yield Holder(prefix, module._buffers, is_open=False, registered=True), ()
            if not is_of_torch(type(module)):
                own = [(k, v) for k, v in vars(module).items() if k not in _OF_MODULES]
                holder = Holder(prefix, vars(module))
                yield holder, _inside(holder, own)


def _container(name: str, value: Any) -> Iterator[tuple[Holder | None, Iterable[Root]]]:
    kind = kind_of(type(value))
    if kind in (Kind.MAPPING, Kind.SEQUENCE, Kind.FIXED) and len(value) > MOST_ITEMS:
        return
    if kind is Kind.MAPPING:
        holder = Holder(name, value, IN_BRACKETS)
        yield holder, _inside(holder, value.items())
    elif kind in (Kind.SEQUENCE, Kind.FIXED):
        holder = Holder(name, value, IN_BRACKETS)
        changes = kind is Kind.SEQUENCE and all(map(_is_state, value))
        yield holder if changes else None, _inside(holder, enumerate(value))
    elif isinstance(value, types.SimpleNamespace) or (
        kind is Kind.OBJECT and _is_peoples_own(type(value))
    ):
        own, slots = getattr(value, "__dict__", None), slots_of(type(value))
        held = [own] if type(own) is dict else []
        for each in (*held, *([attributes_of(value, slots)] if slots else ())):
            holder = Holder(name, each, is_open=each is own)
            yield holder, _inside(holder, each.items())


def _inside(holder: Holder, items: Iterable[tuple[Any, Any]]) -> list[Root]:
    """List what is to be looked into of what a holder holds."""
    return [(holder.path(key), value) for key, value in items if not _is_state(value)]


def _is_peoples_own(cls: type[Any]) -> bool:
    if cls.__module__ == "builtins":
        return False
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return not is_library(file or "")


def _is_state(value: Any) -> bool:
    """Say whether a value is a tensor, a number or a text, or a tuple of such."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter) and is_small(value)
    if isinstance(value, tuple):
        return all(map(_is_state, value))
    return isinstance(value, PRIMITIVES) or is_array(value)


def is_array(value: Any) -> bool:
    """Say whether a value is one of NumPy's arrays of real numbers, and small: an average."""
    numpy = sys.modules.get("numpy")
    known = numpy is not None and type(value) is numpy.ndarray and value.dtype.kind == "f"
    return bool(known and value.nbytes <= MOST_ARRAY_BYTES)


def _is_small_container(value: Any) -> bool:
    """Say whether a value is a list, a dict or an object that holds state, rather than a graph."""
    kind = kind_of(type(value))
    if kind in (Kind.MAPPING, Kind.SEQUENCE):
        items = value.values() if kind is Kind.MAPPING else value
    elif kind is Kind.OBJECT:
        items = getattr(value, "__dict__", {}).values()
    else:
        return False
    tensors = (each for each in items if isinstance(each, torch.Tensor))
    return len(items) <= MOST_ITEMS and all(t.grad_fn is None and is_small(t) for t in tensors)


def is_of_torch(cls: type[nn.Module]) -> bool:
    """Return whether a class of modules is one of torch's own, whose state is all in buffers."""
    return cls.__module__.startswith("torch.")


def is_small(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is small enough to be state rather than data."""
    return tensor.numel() * tensor.element_size() <= MOST_BYTES


def differ(one: Any, other: Any) -> bool:
    """Say whether one value must be replaced by the other."""
    if one is other:
        return False
    if is_array(one) and is_array(other):
        return bool(one.shape != other.shape or one.tobytes() != other.tobytes())
    known = isinstance(one, PRIMITIVES) and type(one) is type(other)
    return not (known and one == other)


def _may_stay(value: Any, before: Any) -> bool:
    """Say whether what a skipped step left may stay, where something else was before."""
    if isinstance(value, str):
        return True
    known = before is None and isinstance(value, PRIMITIVES)
    return known and not (isinstance(value, float) and not math.isfinite(value))


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach() if value.grad_fn is not None else value
    if is_array(value):
        return value.copy()
    if isinstance(value, tuple) and any(isinstance(each, torch.Tensor) for each in value):
        items = map(_detached, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield name, value
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from _tensors(f"{name}[{index}]", each)


def code_of(root: nn.Module) -> list[Root]:
    """Name the classes of people's own of a model's modules.

    Their attributes are state as well, and so are global variables that their functions name.
    """
    classes = dict.fromkeys(each for module in root.modules() for each in type(module).__mro__)
    return [(cls.__name__, cls) for cls in classes if _is_peoples_own(cls)]


def hooks_of(root: nn.Module) -> list[Root]:
    """List the hooks on a model's forward passes: they may average what they are shown."""
    return [
        (path, hook)
        for path, module in root.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ]


def state_in_sight(known: Iterable[nn.Module]) -> list[Root]:
    """List what the training loop has at hand that may keep state, besides `known` and their parts.

    Those are modules in training, objects of people's own classes that can be called, and functions
    with variables of their own: losses and normalisers, mostly. They are in the loop's variables,
    in the global ones of its file, and in the attributes of its `self`, if that is no module.
    """
    inside = {id(module) for root in known for module in root.modules()}
    return [
        (name, value)
        for variables in variables_in_sight()
        if "_parameters" not in variables
        for name, value in variables.items()
        if id(value) not in inside and _may_keep_state(value)
    ]


def _may_keep_state(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return value.training
    if isinstance(value, types.FunctionType):
        return value.__closure__ is not None and not is_library(value.__code__.co_filename)
    kind = type(value)
    own = kind_of(kind) is Kind.OBJECT and _is_peoples_own(kind)
    return own and callable(value) and bool(kind.__weakrefoffset__)
