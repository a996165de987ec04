"""Finding and casting the tensors in whatever a model returns.

Tuples (named ones too), lists, mappings, dataclasses and plain objects are rebuilt, the user's own
object stays as it is. What holds no 16-bit tensor is returned itself. What does and cannot be
rebuilt is returned too, and is named.
"""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import keras

from autoprec.backends.keras.dtypes import is_low

#: What holds no tensors of a model's output, or is none of it.
_CLOSED = (
    *(str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType),
    *(types.MethodType, types.BuiltinFunctionType, keras.Layer, keras.Variable),
    *(keras.optimizers.Optimizer, keras.losses.Loss, keras.metrics.Metric, keras.DTypePolicy),
)

#: Objects of these libraries, tensors aside, are not taken apart.
_LIBRARIES = ("tensorflow", "keras", "numpy", "torch")

#: Told of an object with 16-bit tensors that cannot be rebuilt, and why.
Refused = Callable[[Any, str], None]


def to_float32(value: Any, refused: Refused | None = None) -> Any:
    """Cast every 16-bit floating tensor in a nested `value` to float32; leave the rest."""
    return _mapped(value, refused or (lambda value, why: None), ())


def tensors_in(value: Any) -> list[Any]:
    """List the tensors nested in `value`, in order."""
    return list(_tensors_in(value, ()))


def _mapped(value: Any, refused: Refused, outside: tuple[int, ...]) -> Any:
    if value is None or id(value) in outside:
        return value
    if _is_tensor(value):
        return _tensor_to_float32(value)
    if isinstance(value, types.GeneratorType):
        return (_mapped(item, refused, outside) for item in value)
    found = {
        key: (item, _mapped(item, refused, (*outside, id(value)))) for key, item in _items(value)
    }
    changed = {key: new for key, (item, new) in found.items() if new is not item}
    if not changed:
        return value
    if is_low(getattr(value, "dtype", None)):
        refused(value, "it fixed its own dtype when it was made, as a distribution does")
        return value
    try:
        return _with_items(value, {key: new for key, (_, new) in found.items()}, changed)
    except Exception as error:
        refused(value, f"{type(error).__name__}: {error}")
        return value


def _tensors_in(value: Any, outside: tuple[int, ...]) -> Iterator[Any]:
    if _is_tensor(value):
        yield value
    elif value is not None and id(value) not in outside:
        for _, item in _items(value):
            yield from _tensors_in(item, (*outside, id(value)))


def _is_tensor(value: Any) -> bool:
    if keras.ops.is_tensor(value) or isinstance(value, keras.KerasTensor):
        return True
    # Sparse and ragged ones, and arrays.
    library = type(value).__module__.partition(".")[0] in _LIBRARIES
    return library and hasattr(value, "dtype") and hasattr(value, "shape")


def _tensor_to_float32(value: Any) -> Any:
    if not is_low(value.dtype):
        return value
    mask = getattr(value, "_keras_mask", None)
    result = keras.ops.cast(value, "float32")
    if mask is not None:
        result._keras_mask = mask
    return result


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return what a container or an object holds, by key, index or attribute; a leaf holds none."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    if isinstance(value, _CLOSED) or type(value).__module__.partition(".")[0] in _LIBRARIES:
        return []
    names = [*getattr(value, "__dict__", ()), *slot_names(type(value))]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def slot_names(kind: type) -> list[str]:
    """List the attributes that a class keeps in slots."""
    found: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _with_items(value: Any, items: Mapping[Any, Any], changed: Mapping[Any, Any]) -> Any:
    """Return a copy of `value` that holds `items`, of which `changed` are not its own."""
    if type(value) is dict:
        return dict(items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items.values())
    if isinstance(value, deque):
        return type(value)(items.values(), value.maxlen)
    if isinstance(value, list | tuple):
        return type(value)(items.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    clone = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, MutableMapping):
            clone[key] = item
        else:
            object.__setattr__(clone, key, item)
    return clone
