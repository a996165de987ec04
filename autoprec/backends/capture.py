"""What a function of the user's returned, as a task: parts, a trainer, or a compiled model.

Which it is, the modules of the types say: no framework and no trainer is imported to find out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from autoprec.backends import registry
from autoprec.backends.protocol import Task
from autoprec.errors import TaskError, UsageError

_PARTS = ("model", "optimizer", "loader", "step")
_OPTIONAL_PARTS = ("clip_grad_norm",)
_LIGHTNING = ("lightning", "pytorch_lightning")
_EXPECTED = (
    "(model, optimizer, loader, step) or a dict of these, where step(model, batch) returns the "
    "loss; (Lightning Trainer, module, loader or datamodule); a transformers Trainer; or "
    "(compiled Keras model, x, y)"
)


def task_of(objects: Any, *, name: str) -> Task:
    """Make a task of objects; `UsageError` says what was given where they are none of these."""
    module, function, given, named = _recognised(objects, name)
    capture = importlib.import_module(f"autoprec.backends.{module}")
    task: Task = getattr(capture, function)(*given, **named, name=name)
    return task


def check_objects(objects: Any, *, name: str) -> None:
    """Raise `UsageError` for objects that no task can be made of; do not look into them."""
    _recognised(objects, name)


def reduced(value: Any) -> tuple[Any, ...] | None:
    """Return how a value is pickled where its framework would not send it whole; else None."""
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(value, getattr(keras, "Model", ())):
        return None
    found: tuple[Any, ...] = importlib.import_module("autoprec.backends.keras.sent_models").reduced(
        value
    )
    return found


def is_factory(objects: Any) -> bool:
    """Say whether objects are a function that returns them, rather than a model or a trainer."""
    return inspect.isroutine(objects) or isinstance(objects, functools.partial)


def _recognised(objects: Any, name: str) -> tuple[str, str, Sequence[Any], Mapping[str, Any]]:
    """Return the module, the function and the arguments that make a task of objects."""
    if isinstance(objects, Mapping):
        return _of_parts(_named(objects, name), name)
    given = objects if isinstance(objects, tuple | list) else (objects,)
    if len(given) == 1 and _is_a(given[0], "transformers", "Trainer"):
        return "torch.capture", "from_transformers", given, {}
    if 2 <= len(given) <= 3 and any(_is_a(given[0], each, "Trainer") for each in _LIGHTNING):
        return "torch.capture", "from_lightning", given, {}
    framework = _framework(given[0]) if given else ""
    if framework == "keras" and 2 <= len(given) <= 4:
        return "keras.capture", "from_keras", given, {}
    if framework == "torch" and len(given) == len(_PARTS):
        return _of_parts(dict(zip(_PARTS, given, strict=True)), name)
    raise UsageError(f"{name}: {_described(objects)} given, expected {_EXPECTED}")


def _named(objects: Mapping[Any, Any], name: str) -> Mapping[str, Any]:
    missing = [each for each in _PARTS if each not in objects]
    unknown = [str(each) for each in objects if each not in (*_PARTS, *_OPTIONAL_PARTS)]
    if missing or unknown:
        said = [f"without {', '.join(missing)}"] if missing else []
        said += [f"with {', '.join(unknown)}, which is not read"] if unknown else []
        known = f"{', '.join(_PARTS)} (and, if wanted, {', '.join(_OPTIONAL_PARTS)})"
        raise UsageError(f"{name}: a dict {' and '.join(said)} given, expected one of {known}")
    return objects


def _of_parts(
    parts: Mapping[str, Any], name: str
) -> tuple[str, str, Sequence[Any], Mapping[str, Any]]:
    if _framework(parts["model"]) != "torch":
        raise UsageError(
            f"{name}: the model is {_described(parts['model'])}, expected a torch.nn.Module beside "
            "an optimizer, a loader and a step; of Keras give (compiled model, x, y)"
        )
    return "torch.capture", "from_parts", (), parts


def _framework(model: object) -> str:
    """Return the name of the backend that owns a model; empty where there is none."""
    try:
        return registry.owner(model)
    except TaskError:
        return ""


def _is_a(value: object, package: str, kind: str) -> bool:
    """Say whether a value is of a class of a package, by the names of both."""
    return any(
        parent.__name__ == kind and f"{parent.__module__}.".startswith(f"{package}.")
        for parent in type(value).__mro__
    )


def _described(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        kinds = ", ".join("None" if each is None else type(each).__name__ for each in value)
        return f"a {type(value).__name__} of ({kinds})"
    return f"a {type(value).__module__}.{type(value).__qualname__}"
