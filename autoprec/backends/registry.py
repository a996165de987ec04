"""Knows which backends there are, and imports one only when it is asked for.

A model belongs to the framework of the first class in its MRO that a framework defines: a Keras
layer on the torch backend is also an nn.Module, and it is Keras's.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import cast

from autoprec.backends.base import Backend
from autoprec.errors import FrameworkMissing, TaskError


@dataclass(frozen=True)
class Entry:
    """Where a backend lives, and whose classes it owns."""

    home: str
    owns: tuple[str, ...]
    needs: tuple[str, ...]
    extra: str


ENTRIES = {
    "torch": Entry("autoprec.backends.torch.backend:TorchBackend", ("torch",), ("torch",), "torch"),
    "keras": Entry(
        "autoprec.backends.keras.backend:KerasBackend",
        ("keras", "tf_keras", "tensorflow"),
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
    """Every backend's name; imports none of them."""
    return tuple(ENTRIES)


def load(name: str) -> Backend:
    """Import and build the backend `name`; `FrameworkMissing` if its framework is not installed."""
    entry = ENTRIES.get(name)
    if entry is None:
        raise FrameworkMissing(f"unknown framework {name!r}: expected one of {', '.join(ENTRIES)}")
    for module in entry.needs:
        if importlib.util.find_spec(module) is None:
            raise FrameworkMissing(
                f"{name} is not installed here; install it with "
                f"`pip install 'autoprec[{entry.extra}]'`"
            )
    home, _, attribute = entry.home.partition(":")
    return cast(Backend, getattr(importlib.import_module(home), attribute)())


def owner(model: object) -> str:
    """The name of the backend that a model belongs to; `TaskError` if there is none."""
    for parent in type(model).__mro__:
        for name, entry in ENTRIES.items():
            if any(_within(parent.__module__, prefix) for prefix in entry.owns):
                return name
    kind = "None" if model is None else f"a {type(model).__module__}.{type(model).__qualname__}"
    raise TaskError(
        f"build_model returned {kind}, expected a torch.nn.Module or a compiled keras.Model"
    )


def _within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")
