"""Finding and casting the tensors in whatever a model returns.

Tuples (named ones too), lists, mappings and their views, dataclasses, plain objects, partials and
bound methods are rebuilt, the user's own object stays as it is. Iterators are gone through as the
user does. What holds no 16-bit tensor is returned itself. What does and cannot be rebuilt, such as
a function that encloses one, is returned too, and is named.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping
from typing import Any

import keras

from autoprec.backends.keras.dtypes import is_low

#: What holds no tensors of a model's output, or is none of it.
_CLOSED = (
    *(str, bytes, int, float, complex, type, types.ModuleType, types.BuiltinFunctionType),
    *(keras.Layer, keras.Variable),
    *(keras.optimizers.Optimizer, keras.losses.Loss, keras.metrics.Metric, keras.DTypePolicy),
)

#: Objects of these libraries, tensors aside, are not taken apart.
_LIBRARIES = ("tensorflow", "keras", "numpy", "torch")

#: Iterators of Python's own, and views of dicts.
_ITERATORS = (
    types.GeneratorType,
    zip,
    map,
    filter,
    enumerate,
    reversed,
    *map(
        type,
        (
            *(
                iter([]),
                iter(()),
                iter({}),
                iter({}.values()),
                iter({}.items()),
                iter(set()),
                iter(deque()),
            ),
            *(reversed([]), reversed({}.values()), reversed({}.items())),
        ),
    ),
)
_VIEWS: tuple[type[Any], ...] = (type({}.values()), type({}.items()))

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
    if isinstance(value, _ITERATORS) or type(value).__module__ == "itertools":
        return (_mapped(item, refused, outside) for item in value)
    if _is_tensor_array(value):
        return _tensor_array_to_float32(value, refused)
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


def _is_tensor_array(value: Any) -> bool:
    if keras.config.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return isinstance(value, tf.TensorArray)


def _tensor_array_to_float32(value: Any, refused: Refused) -> Any:
    """Return another `tf.TensorArray`; this one stays readable."""
    import tensorflow as tf

    if not is_low(value.dtype):
        return value
    try:
        implementation = value._implementation
        count, shape = value.size(), value.element_shape
        found = tf.TensorArray("float32", count, element_shape=shape, infer_shape=False)
        if tf.executing_eagerly():
            for index, item in enumerate(implementation._tensor_array):
                found = found if item is None else found.write(index, tf.cast(item, "float32"))
            return found
        return tf.while_loop(
            lambda index, _: index < count,
            lambda index, made: (
                index + 1,
                made.write(index, tf.cast(value.read(index), "float32")),
            ),
            (tf.constant(0), found),
        )[1]
    except Exception as error:
        refused(value, f"{type(error).__name__}: {error}")
        return value


def enclosed_by(function: types.FunctionType) -> list[tuple[str, Any]]:
    """List the variables that a function encloses, and its default arguments."""
    found: list[tuple[str, Any]] = []
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found.append((name, cell.cell_contents))
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*found, *((f"default {index}", item) for index, item in enumerate(defaults))]


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return what a container or an object holds, by key, index or attribute; a leaf holds none."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, _VIEWS):
        return list(value.mapping.items())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return list(enumerate(value))
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__)]
    if isinstance(value, types.FunctionType):
        return list(enclosed_by(value))
    if isinstance(value, _ITERATORS):
        return []
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
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(items.values())
    if isinstance(value, _VIEWS):
        rebuilt = dict(items)
        return rebuilt.items() if isinstance(value, ItemsView) else rebuilt.values()
    if isinstance(value, functools.partial):
        return functools.partial(items["func"], *items["args"], **items["keywords"])
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, items["__self__"])
    if isinstance(value, types.FunctionType):
        raise TypeError("a function keeps the variables that it encloses")
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    clone = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, MutableMapping):
            clone[key] = item
        else:
            object.__setattr__(clone, key, item)
    return clone
