"""Where a model holds its optimizers: in attributes, and in lists, tuples and dicts of those.

Keras knows of one, `compile`'s own; a model with a train_step of its own may hold any number, in
any of these. What someone else's object holds is not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras

#: How TensorFlow's own attributes on a model begin; they name again what the model holds.
_TENSORFLOW_PREFIX = "_self_"


def optimizers_of(model: Any) -> list[Any]:
    """List the optimizers a model holds, each once, the compiled one first."""
    found = (
        each for value in optimizer_attributes(model).values() for each in _optimizers_inside(value)
    )
    return list({id(optimizer): optimizer for optimizer in found}.values())


def optimizer_attributes(model: Any) -> dict[str, Any]:
    """Return the attributes of a model that hold optimizers, the compiled one first."""
    found = {
        name: value
        for name, value in vars(model).items()
        if not name.startswith(_TENSORFLOW_PREFIX) and any(True for _ in _optimizers_inside(value))
    }
    return dict(sorted(found.items(), key=lambda item: item[0] != "optimizer"))


def replace_optimizers(value: Any, change: Callable[[Any], Any]) -> Any:
    """Replace each optimizer in `value` by its `change`; the same object if nothing changes."""
    if isinstance(value, keras.optimizers.Optimizer):
        return change(value)
    if isinstance(value, dict):
        table = {key: replace_optimizers(each, change) for key, each in value.items()}
        return value if all(table[key] is value[key] for key in value) else table
    if not isinstance(value, list | tuple):
        return value
    row = [replace_optimizers(each, change) for each in value]
    if all(new is old for new, old in zip(row, value, strict=True)):
        return value
    if isinstance(value, list):
        return row
    return type(value)(*row) if hasattr(value, "_fields") else tuple(row)


def _optimizers_inside(value: Any) -> Iterator[Any]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_inside(each)
