"""What a function of the user's returned, as a task: parts, a trainer, or a compiled model.

Which it is, the modules of the types say: no framework and no trainer is imported to find out.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
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
    if isinstance(objects, Mapping):
        return _of_parts(_named(objects, name), name)
    given = objects if isinstance(objects, tuple | list) else (objects,)
    if len(given) == 1 and _is_a(given[0], "transformers", "Trainer"):
        return _made("torch.capture", "from_transformers", given, name)
    if 2 <= len(given) <= 3 and any(_is_a(given[0], each, "Trainer") for each in _LIGHTNING):
        return _made("torch.capture", "from_lightning", given, name)
    framework = _framework(given[0]) if given else ""
    if framework == "keras" and 2 <= len(given) <= 4:
        return _made("keras.capture", "from_keras", given, name)
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


def _of_parts(parts: Mapping[str, Any], name: str) -> Task:
    if _framework(parts["model"]) != "torch":
        raise UsageError(
            f"{name}: the model is {_described(parts['model'])}, expected a torch.nn.Module beside "
            "an optimizer, a loader and a step; of Keras give (compiled model, x, y)"
        )
    capture = importlib.import_module("autoprec.backends.torch.capture")
    task: Task = capture.from_parts(**parts, name=name)
    return task


def _made(module: str, function: str, given: Any, name: str) -> Task:
    capture = importlib.import_module(f"autoprec.backends.{module}")
    task: Task = getattr(capture, function)(*given, name=name)
    return task


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
