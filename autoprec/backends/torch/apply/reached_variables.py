"""Variables that are in no dict of their own, as a mapping: of closures, classes and slots."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from typing import Any


class ReachedVariables(MutableMapping[str, Any]):
    """Variables as a mapping: what is read and set by name, of names that stay the same."""

    def __init__(
        self,
        owner: Any,
        names: Iterable[str],
        read: Callable[[str], Any],
        write: Callable[[str, Any], None],
    ) -> None:
        self.owner = owner
        self._names, self._read, self._write = list(names), read, write

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        try:
            return self._read(name)
        except (AttributeError, ValueError):  # not assigned yet
            return None

    def __setitem__(self, name: str, value: Any) -> None:
        self._write(name, value)

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def cells_of(function: types.FunctionType) -> ReachedVariables:
    """Return the variables of functions around a function that its code names."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def write(name: str, value: Any) -> None:
        cells[name].cell_contents = value

    return ReachedVariables(
        function.__closure__, cells, lambda name: cells[name].cell_contents, write
    )


def globals_of(function: types.FunctionType) -> ReachedVariables:
    """Return the global variables that a function's code names."""
    outside = function.__globals__
    names = (name for name in _named_in(function.__code__) if name in outside)
    return ReachedVariables(function, names, outside.get, outside.__setitem__)


def attributes_of(owner: Any, names: Iterable[str]) -> ReachedVariables:
    """Return attributes that are not in a dict: those of a class, and slots."""
    return ReachedVariables(owner, names, partial(getattr, owner), partial(setattr, owner))


def _named_in(code: types.CodeType) -> list[str]:
    """Return the global names that code, and code inside of it, uses."""
    codes = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    inner = [name for each in codes for name in _named_in(each)]
    return list(dict.fromkeys((*code.co_names, *inner)))
