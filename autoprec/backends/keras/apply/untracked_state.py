"""Finds variables that a model's code keeps where Keras does not look for them.

`model.variables` knows what `add_weight` makes and the Keras variables in attributes of layers. It
does not know a `tf.Variable` there, nor what a loss, a metric inside a layer or loss, or a plain
object in an attribute holds. A forward pass may change those as it does BatchNorm's averages.

Looked into are attributes of layers and of what they hold: containers, losses, metrics, plain
objects, closures and bound methods. Not looked into are optimizers, metrics that Keras itself
resets, objects of libraries, and global variables.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras

from autoprec.backends.keras.apply.layer_names import LayerUnit, child_layers
from autoprec.backends.keras.apply.nested_outputs import enclosed_by, slot_names

#: Objects that are looked into for one model; it bounds what applying a recipe may cost.
MOST_HOLDERS = 20_000

_PRIMITIVES = (str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_GENERATOR = keras.random.SeedGenerator
_LEFT_ALONE = (*_PRIMITIVES, keras.optimizers.Optimizer, keras.KerasTensor)
_LOOKED_INTO = (keras.Layer, keras.losses.Loss, keras.metrics.Metric, _GENERATOR)
_CLOSED_LIBRARIES = frozenset(
    {"autoprec", "keras", "tensorflow", "torch", "numpy", "jax"} | sys.stdlib_module_names
)


@dataclass(frozen=True)
class UntrackedVariable:
    """A `tf.Variable` or `keras.Variable`, and its place: "average/helper.mean".

    `draws` marks the state of a generator of random numbers.
    """

    path: str
    variable: Any
    draws: bool = False


def untracked_variables(model: Any, units: Collection[LayerUnit]) -> list[UntrackedVariable]:
    """List what `units` of a model reach besides its own variables, in the same order each time."""
    skipped = {id(metric) for metric in getattr(model, "metrics", ())}
    skipped |= {id(member) for unit in units for member in unit.members}
    known = {id(variable) for variable in (*model.variables, *carried_states(model))}
    search = _Search(skipped, known)
    found: list[UntrackedVariable] = []
    for unit in units:
        for member in unit.members:
            found += search.below(member, unit.path)
    return found


def carried_states(model: Any) -> list[Any]:
    """List what the stateful recurrent layers of a model, or one such, carry to the next batch."""
    recurrent = [each for each in model._flatten_layers() if isinstance(each, keras.layers.RNN)]
    states = [state for each in recurrent if each.stateful for state in _flat(each.states)]
    return [state for state in states if isinstance(state, keras.Variable)]


def _flat(states: Any) -> list[Any]:
    found: list[Any] = keras.tree.flatten(states)
    return found


def stored_value(variable: Any) -> Any:
    """Return a variable's value now, also once it is assigned another; of neither dtype cast.

    Not `variable.value`, which inside a layer is cast to 16 bits.
    """
    stored = getattr(variable, "_value", variable) if is_keras(variable) else variable
    if keras.config.backend() == "tensorflow":
        return stored.read_value()
    return keras.ops.copy(stored)


def is_keras(variable: Any) -> bool:
    """Say whether a variable is one of Keras's, rather than of the library below."""
    return isinstance(variable, keras.Variable)


class _Search:
    """A walk through what layers hold; each object is looked into once."""

    def __init__(self, skipped: set[int], known: set[int]) -> None:
        self._skipped, self._known = skipped, known
        self._left = MOST_HOLDERS

    def below(self, layer: Any, path: str) -> Iterator[UntrackedVariable]:
        """Yield what a layer's attributes reach, its own layers aside."""
        pending = list(reversed(list(_held_by_layer(layer, f"{path}/" if path else ""))))
        while pending and self._left > 0:
            place, value, draws = pending.pop()
            if isinstance(value, _LEFT_ALONE) or id(value) in self._skipped:
                continue
            if _is_variable(value):
                if id(value) not in self._known:
                    self._known.add(id(value))
                    yield UntrackedVariable(place, value, draws)
                continue
            self._skipped.add(id(value))
            self._left -= 1
            inside = [(name, item, draws or _is_generator(value)) for name, item in _held(value)]
            pending += [(place + name, item, drawn) for name, item, drawn in reversed(inside)]


def _held_by_layer(layer: Any, prefix: str) -> Iterator[tuple[str, Any, bool]]:
    own = {id(child) for child in child_layers(layer)}
    for name, value in _attributes(layer):
        if id(value) not in own and name not in ("_layers", "_metrics"):
            yield prefix + name, value, False


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes, those that name what a private one lists first."""
    names = [*getattr(value, "__dict__", ()), *slot_names(type(value))]
    for name in sorted(names, key=lambda name: name.startswith("_")):
        if not name.startswith("_self_") and hasattr(value, name):  # "_self_": TensorFlow's own
            yield name, getattr(value, name)


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with how it is reached."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, _CONTAINERS):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        yield from (("", part) for part in parts)
    elif isinstance(value, types.FunctionType):
        yield from ((f".{name}", item) for name, item in enclosed_by(value))
    elif _is_looked_into(value):
        yield from ((f".{name}", item) for name, item in _attributes(value))


def _is_looked_into(value: Any) -> bool:
    if isinstance(value, _LOOKED_INTO) or _is_module(value) or _is_generator(value):
        return True
    if isinstance(value, types.SimpleNamespace):
        return True
    return type(value).__module__.partition(".")[0] not in _CLOSED_LIBRARIES


def _is_variable(value: Any) -> bool:
    if isinstance(value, keras.Variable):
        return True
    if keras.config.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return isinstance(value, tf.Variable)


def _is_generator(value: Any) -> bool:
    if isinstance(value, _GENERATOR):
        return True
    if keras.config.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return isinstance(value, tf.random.Generator)


def _is_module(value: Any) -> bool:
    """Say whether an object is a `tf.Module`, the base of many libraries' objects."""
    if keras.config.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return isinstance(value, tf.Module) and not isinstance(value, tf.Variable)
