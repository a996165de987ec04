"""Knows which backends there are, and imports one only when it is asked for.

A model belongs to the framework of the first class in its MRO that a framework defines: a Keras
layer on the torch backend is also an nn.Module, and it is Keras's.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import cast

from autoprec.backends.protocol import Backend
from autoprec.errors import FrameworkMissing, TaskError


@dataclass(frozen=True)
class Entry:
    """Where a backend lives, and whose classes it owns."""

    class_path: str
    module_prefixes: tuple[str, ...]
    required_modules: tuple[str, ...]
    extra: str


ENTRIES = {
    "torch": Entry("autoprec.backends.torch.backend:TorchBackend", ("torch",), ("torch",), "torch"),
    "keras": Entry(
        "autoprec.backends.keras.backend:KerasBackend",
        ("keras", "tensorflow"),
        ("keras",),
        "tensorflow",
    ),
    "simulated": Entry(
        "autoprec.backends.simulated.backend:SimulatedBackend",
        ("autoprec.backends.simulated",),
        (),
        "",
    ),
}


def names() -> tuple[str, ...]:
    """List every backend's name; import none of them."""
    return tuple(ENTRIES)


def load(name: str) -> Backend:
    """Import and build the backend `name`; `FrameworkMissing` if its framework is not installed."""
    entry = ENTRIES.get(name)
    if entry is None:
        raise FrameworkMissing(f"unknown framework {name!r}: expected one of {', '.join(ENTRIES)}")
    for needed in entry.required_modules:
        if importlib.util.find_spec(needed) is None:
            raise FrameworkMissing(
                f"{name} is not installed here; install it with "
                f"`pip install 'autoprec[{entry.extra}]'`"
            )
    class_path, _, attribute = entry.class_path.partition(":")
    try:
        module = importlib.import_module(class_path)
    except ImportError as error:
        raise FrameworkMissing(
            f"{name} is installed and cannot be imported: {error}; install what is missing"
            + (", or set KERAS_BACKEND=tensorflow" if name == "keras" else "")
        ) from error
    return cast(Backend, getattr(module, attribute)())


def owner(model: object, source: str = "build_model returned") -> str:
    """Return the name of the backend that owns a model; `TaskError` if there is none.

    `source` says in the error where the model is from.
    """
    refuse_keras_2(model)
    for parent in type(model).__mro__:
        for name, entry in ENTRIES.items():
            if any(_within(parent.__module__, prefix) for prefix in entry.module_prefixes):
                return name
    kind = "None" if model is None else f"a {type(model).__module__}.{type(model).__qualname__}"
    raise TaskError(f"{source} {kind}, expected a torch.nn.Module or a compiled keras.Model")


def refuse_keras_2(model: object) -> None:
    """Raise `TaskError` for a model of tf_keras."""
    for parent in type(model).__mro__:
        if _within(parent.__module__, "tf_keras"):
            raise TaskError(
                f"a model of Keras 2 was given ({parent.__module__}), expected one of Keras 3: "
                "import keras instead of tf_keras, and unset TF_USE_LEGACY_KERAS"
            )


def _within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")
