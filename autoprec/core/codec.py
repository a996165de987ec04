"""Converts frozen dataclasses to plain values and back, strictly, from the fields alone.

Every file and every message autoprec reads or writes goes through here, so that a field added to a
dataclass is read, written and checked without a second list of names. Reading is strict: unknown
keys (with the nearest known one named), missing keys, wrong types and numbers out of range are a
`DecodeError` that says where. Booleans are never taken for numbers, and text never for either. A
derived field (`init=False`) is written for people who read the file, and ignored on reading.

Supported: dataclasses, str, int, float, bool, None, StrEnum, Literal, X | Y, tuple[X, ...],
frozenset[X], Mapping[str, X], paths (as text) and object (any plain value).
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum, StrEnum
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

_RANGE_KEY = "autoprec.range"


class DecodeError(ValueError):
    """A plain value does not fit the dataclass it is read as; `path` says where."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or 'the top level'}: {problem}")
        self.path = path
        self.problem = problem


def bounded(*, low: float, high: float, default: Any = dataclasses.MISSING) -> Any:
    """Declare a dataclass field for a number that must lie in [low, high] when it is read."""
    return dataclasses.field(default=default, metadata={_RANGE_KEY: (low, high)})


def range_of(info: dataclasses.Field[Any]) -> tuple[float, float] | None:
    """Return the range that a field's number must lie in; None if it has none."""
    limits: tuple[float, float] | None = info.metadata.get(_RANGE_KEY)
    return limits


#: The types that stay as they are, and what they are called.
_SCALARS: Mapping[Any, str] = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def to_plain(value: object) -> Any:
    """Turn dataclasses, enums, tuples, paths, subclasses of str into what YAML and JSON know."""
    if type(value) in _SCALARS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(to_plain(item) for item in value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # subclasses (a library's version, a NumPy float) lose their class
    if isinstance(value, Sequence):
        return [to_plain(item) for item in value]
    return str(value) if _is_path(type(value)) else value


def without_empty(value: object) -> Any:
    """Convert like `to_plain`, leaving out fields that are empty, 0 or dataclasses by default."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return to_plain(value)
    shown = {}
    for info in dataclasses.fields(value):
        item = getattr(value, info.name)
        empty = not isinstance(item, bool) and (not item or dataclasses.is_dataclass(item))
        if not (empty and item == info.default):
            shown[info.name] = without_empty(item)
    return shown


def from_plain(kind: type[T], value: object, path: str = "") -> T:
    """Read `value` as a `kind`; raise `DecodeError` if it does not fit."""
    return typing.cast(T, _decode(kind, value, path))


def _decode(kind: Any, value: object, path: str) -> object:
    if kind in _SCALARS:
        return _decode_scalar(kind, value, path)
    origin = typing.get_origin(kind)
    if kind is object or kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), value, path)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        if not any(value == c and type(value) is type(c) for c in choices):
            raise DecodeError(
                path, f"{abbreviate(value)} given, expected one of {_join_names(choices)}"
            )
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, path)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        names = [member.value for member in kind]
        if not isinstance(value, str) or value not in names:
            raise DecodeError(
                path,
                f"{abbreviate(value)} given, expected one of {_join_names(names)}"
                f"{did_you_mean(value, names)}",
            )
        return kind(value)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, path)
    if origin is frozenset:
        (item,) = typing.get_args(kind)
        return frozenset(typing.cast(Any, _decode_tuple((item, ...), value, path)))
    if origin in (dict, collections.abc.Mapping):
        return _decode_mapping(typing.get_args(kind), value, path)
    return _decode_scalar(kind, value, path)


def _decode_union(options: tuple[Any, ...], value: object, path: str) -> object:
    if value is None and type(None) in options:
        return None
    problems = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _decode(option, value, path)
        except DecodeError as error:
            problems.append(error)
    deepest = max(problems, key=lambda error: len(error.path))
    if len(problems) == 1 or len(deepest.path) > len(path):
        raise deepest
    names = _join_names([getattr(option, "__name__", str(option)) for option in options])
    raise DecodeError(path, f"{abbreviate(value)} given, expected one of {names}")


@cache
def _fields(kind: type) -> Mapping[str, tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(kind)
    return {
        f.name: (f, hints[f.name]) for f in dataclasses.fields(typing.cast(Any, kind)) if f.init
    }


def _decode_dataclass(kind: type, value: object, path: str) -> object:
    if not isinstance(value, Mapping):
        raise DecodeError(
            path, f"{abbreviate(value)} given, expected a mapping with {kind.__name__}'s keys"
        )
    fields = _fields(kind)
    derived = {f.name for f in dataclasses.fields(kind) if not f.init}
    for key in value:
        if key not in fields and key not in derived:
            raise DecodeError(
                join_path(path, key),
                f"unknown key{did_you_mean(key, fields)} (known: {', '.join(fields)})",
            )
    arguments: dict[str, object] = {}
    for name, (info, hint) in fields.items():
        if name in value:
            item = _decode(hint, value[name], join_path(path, name))
            _check_range(info, item, join_path(path, name))
            arguments[name] = item
        elif info.default is dataclasses.MISSING and info.default_factory is dataclasses.MISSING:
            raise DecodeError(path, f"the key {name!r} is missing")
    try:
        return kind(**arguments)
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(path, str(error)) from error


def _check_range(info: dataclasses.Field[Any], item: object, path: str) -> None:
    limits = range_of(info)
    if limits is None or not isinstance(item, int | float):
        return
    low, high = limits
    if not low <= item <= high:
        raise DecodeError(
            path, f"{abbreviate(item)} given, expected a number from {low:g} to {high:g}"
        )


def _decode_tuple(options: tuple[Any, ...], value: object, path: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise DecodeError(path, f"{abbreviate(value)} given, expected a list")
    if len(options) == 2 and options[1] is ...:
        return tuple(_decode(options[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if len(value) != len(options):
        raise DecodeError(path, f"{len(value)} items given, expected {len(options)}")
    return tuple(
        _decode(option, item, f"{path}[{i}]")
        for i, (option, item) in enumerate(zip(options, value, strict=True))
    )


def _decode_mapping(options: tuple[Any, ...], value: object, path: str) -> Mapping[object, object]:
    if not isinstance(value, Mapping):
        raise DecodeError(path, f"{abbreviate(value)} given, expected a mapping")
    key_kind, item_kind = options
    return {
        _decode(key_kind, key, join_path(path, key)): _decode(item_kind, item, join_path(path, key))
        for key, item in value.items()
    }


def _is_path(kind: object) -> bool:
    return hasattr(kind, "__fspath__")


def _decode_scalar(kind: Any, value: object, path: str) -> object:
    if _is_path(kind):
        if not isinstance(value, str):
            raise DecodeError(path, f"{abbreviate(value)} given, expected a path")
        return kind(value)
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise DecodeError(path, "an integer too large for a float was given") from None
    if type(value) is not kind:
        raise DecodeError(path, f"{abbreviate(value)} given, expected {_SCALARS.get(kind, kind)}")
    if kind is float and not math.isfinite(typing.cast(float, value)):
        raise DecodeError(path, f"{value} given, expected a finite number")
    return value


def join_path(path: str, key: object) -> str:
    """Return the path of `key` below `path`, printable whatever the key holds."""
    text = key if isinstance(key, str) and key.isprintable() and len(key) <= 80 else abbreviate(key)
    return f"{path}.{text}" if path else text


def did_you_mean(key: object, names: collections.abc.Iterable[str]) -> str:
    """Return "; did you mean NAME?" if a known name is close, else nothing."""
    if not isinstance(key, str) or len(key) > 80:
        return ""
    close = difflib.get_close_matches(key, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def abbreviate(value: object) -> str:
    """Return a short, one-line, printable form of a value from a file."""
    text = ascii(value) if not isinstance(value, list | tuple | Mapping) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def _join_names(names: Sequence[object]) -> str:
    return ", ".join(str(name) for name in names)
