"""What a result holds, however deep: which objects lead to a 16-bit tensor, and how each holds it.

Each object is looked into once, without recursion, so that objects may refer to each other in
circles. Modules, optimizers and objects of the standard library are not looked into; nor are
Hugging Face's caches of keys and values, which go back into the model.
"""

from __future__ import annotations

import collections
import enum
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from autoprec.backends.torch.dtypes import FULL_DTYPES

MOST_HOLDERS = 20_000
"""Objects that are looked into for one result; it bounds what a call may cost."""

PRIMITIVES = (str, bytes, bytearray, int, float, complex, type(None))
_LEFT_ALONE = (*PRIMITIVES, type, enum.Enum, nn.Module, torch.optim.Optimizer, torch.Size)
_ITERATORS = (*map(type, (iter([]), iter(()), iter({}.values()), reversed([]))), zip, map, filter)
_VIEWS: tuple[type[Any], ...] = (type({}.values()), type({}.items()))
_FUNCTIONS = (types.FunctionType, types.MethodType, types.GeneratorType, functools.partial)
_CLOSED = (*_FUNCTIONS, *_ITERATORS, *_VIEWS)
_STATE_FOR_THE_MODEL = "transformers.cache_utils"


class Kind(enum.Enum):
    """How the objects of a class hold others."""

    LEAF = enum.auto()
    MAPPING = enum.auto()
    SEQUENCE = enum.auto()
    FIXED = enum.auto()  # made with its items: a tuple, a set
    ARRAY = enum.auto()  # NumPy's, of objects or of numbers
    OBJECT = enum.auto()
    CLOSED = enum.auto()  # can be looked into, not copied


@dataclass(frozen=True)
class Holder:
    """An object and what it holds: by index, key or attribute, and whether it is an attribute."""

    value: Any
    kind: Kind
    held: list[tuple[bool, Any, Any]]


@dataclass
class Survey:
    """All holders that a value leads to, by id; `changing` those that lead to a 16-bit tensor."""

    holders: dict[int, Holder] = field(default_factory=dict)
    changing: dict[int, torch.dtype] = field(default_factory=dict)
    unseen: bool = False


def survey(value: Any, known: frozenset[int] = frozenset()) -> Survey:
    """Look for 16-bit tensors without recursion, each object once."""
    seen, above = Survey(), collections.defaultdict[int, list[int]](list)
    pending = [value]
    while pending:
        holder = pending.pop()
        if id(holder) in seen.holders or id(holder) in known:
            continue
        if len(seen.holders) >= MOST_HOLDERS:
            seen.unseen = True
            break
        kind = kind_of(type(holder))
        held = list(held_by(holder, kind))
        seen.holders[id(holder)] = Holder(holder, kind, held)
        for _, _, each in held:
            if isinstance(each, torch.Tensor):
                if each.dtype in FULL_DTYPES:
                    seen.changing[id(holder)] = each.dtype
            elif not isinstance(each, PRIMITIVES) and kind_of(type(each)) is not Kind.LEAF:
                above[id(each)].append(id(holder))
                pending.append(each)
    found = list(seen.changing)
    while found:
        below = found.pop()
        for holding in above[below]:
            if holding not in seen.changing:
                seen.changing[holding] = seen.changing[below]
                found.append(holding)
    return seen


def _judge(cls: type[Any]) -> Kind:
    """Return how objects of this class hold others."""
    if issubclass(cls, _LEFT_ALONE):
        return Kind.LEAF
    if issubclass(cls, _CLOSED):
        return Kind.CLOSED
    if issubclass(cls, dict):
        return Kind.MAPPING
    if issubclass(cls, list | collections.deque):
        return Kind.SEQUENCE
    if issubclass(cls, tuple | set | frozenset | types.MappingProxyType):
        return Kind.FIXED
    if any((base.__module__, base.__name__) == ("numpy", "ndarray") for base in cls.__mro__):
        return Kind.ARRAY
    if _is_looked_into(cls):
        return Kind.OBJECT
    holds = hasattr(cls, "__next__") or cls.__dictoffset__ != 0
    return Kind.CLOSED if holds and _is_standard(cls) else Kind.LEAF


def _is_standard(cls: type[Any]) -> bool:
    return (cls.__module__ or "").partition(".")[0] in sys.stdlib_module_names


kind_of = cast("Callable[[type[Any]], Kind]", functools.lru_cache(maxsize=4096)(_judge))


def _is_looked_into(cls: type[Any]) -> bool:
    """Return whether a class is a person's own, or one of torch's and Python's for results."""
    if cls is types.SimpleNamespace:
        return True
    module = cls.__module__ or ""
    if module.startswith(_STATE_FOR_THE_MODEL):
        return False
    top = module.partition(".")[0]
    if top in ("torch", "numpy"):
        return module.startswith("torch.distributions")
    if _is_standard(cls) and module != "collections":
        return False
    return bool(cls.__dictoffset__) or bool(slots_of(cls))


def _list_slots(cls: type[Any]) -> tuple[str, ...]:
    """Return the names of a class's slots, as `getattr` wants them."""
    found = []
    for each in cls.__mro__:
        names = vars(each).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{each.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


slots_of = cast(
    "Callable[[type[Any]], tuple[str, ...]]", functools.lru_cache(maxsize=4096)(_list_slots)
)


def held_by(value: Any, kind: Kind) -> Iterator[tuple[bool, Any, Any]]:
    """Yield (is it an attribute, key or name, what is held) for everything a holder holds."""
    if kind is Kind.CLOSED:
        yield from ((True, None, each) for each in _enclosed(value))
        return
    if kind is Kind.MAPPING:
        yield from ((False, key, each) for key, each in dict.items(value))
    elif kind is Kind.SEQUENCE or kind is Kind.FIXED:
        items = value.items() if isinstance(value, types.MappingProxyType) else enumerate(value)
        yield from ((False, key, each) for key, each in items)
    elif kind is Kind.ARRAY and value.dtype.hasobject:
        yield from ((False, index, each) for index, each in enumerate(value.flat))
    own = getattr(value, "__dict__", None)
    if type(own) is dict:
        yield from ((True, name, each) for name, each in own.items())
    for name in slots_of(type(value)):
        try:
            yield True, name, object.__getattribute__(value, name)
        except AttributeError:
            continue  # a slot that was never set


def _enclosed(value: Any) -> Iterator[Any]:
    """Yield what an object would use when it is called, iterated or asked."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.GeneratorType):
        yield from _without_iterators((value.gi_frame.f_locals if value.gi_frame else {}).values())
    elif isinstance(value, _VIEWS):
        yield from value
    elif isinstance(value, _ITERATORS):
        yield from _iterated(value)
    elif isinstance(value, types.FunctionType):
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue  # not assigned yet
    elif hasattr(type(value), "__next__"):  # enumerate, itertools and the like
        yield from _without_iterators(gc.get_referents(value))
    else:  # a future, a queue; others of the standard library that these know are not their content
        own = getattr(value, "__dict__", {})
        yield from (each for each in own.values() if not _is_standard_object(each))


def _without_iterators(values: Iterable[Any]) -> Iterator[Any]:
    """Yield what iterators go through instead of them."""
    for each in values:
        yield from _enclosed(each) if hasattr(type(each), "__next__") else (each,)


def _is_standard_object(value: Any) -> bool:
    """Say whether it is an object of the standard library that is no container."""
    return kind_of(type(value)) is Kind.CLOSED and not isinstance(value, _CLOSED)


def _iterated(iterator: Any) -> Iterator[Any]:
    """Yield what a built-in iterator goes through, which stays where it is."""
    for source in iterator.__reduce__()[1]:
        yield from _iterated(source) if isinstance(source, _ITERATORS) else (source,)
