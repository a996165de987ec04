"""Lists the backends, and imports one only on request.

A backend is a package with two modules: `capabilities`, which imports no framework, and `backend`.
A model belongs to the framework of the first class in its MRO that a framework defines: a Keras
layer on the torch backend is also an nn.Module, and it is Keras's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import cast

from autoprec.backends.protocol import Backend, Capabilities
from autoprec.errors import FrameworkMissing, TaskError

#: Each backend's package by the framework's name. A new framework is one line here.
PACKAGES: dict[str, str] = {
    "torch": "autoprec.backends.torch",
    "keras": "autoprec.backends.keras",
    "simulated": "autoprec.backends.simulated",
}


def capabilities(name: str) -> Capabilities:
    """Return what is known of a framework without importing it; `FrameworkMissing` if unknown."""
    package = PACKAGES.get(name)
    if package is None:
        raise FrameworkMissing(f"unknown framework {name!r}: expected one of {', '.join(PACKAGES)}")
    return cast(Capabilities, importlib.import_module(f"{package}.capabilities").CAPABILITIES)


def all_capabilities() -> Mapping[str, Capabilities]:
    """Return every framework's capabilities by its name; import none of them."""
    return {name: capabilities(name) for name in PACKAGES}


def load(name: str) -> Backend:
    """Import and build the backend `name`; `FrameworkMissing` if its framework is not installed."""
    known = capabilities(name)
    for needed in known.required_modules:
        if importlib.util.find_spec(needed) is None:
            raise FrameworkMissing(
                f"{name} is not installed here; install it with "
                f"`pip install 'autoprec[{known.extra}]'`"
            )
    try:
        module = importlib.import_module(f"{PACKAGES[name]}.backend")
    except ImportError as error:
        advice = f", or {known.import_advice}" if known.import_advice else ""
        raise FrameworkMissing(
            f"{name} is installed and cannot be imported: {error}; install what is missing{advice}"
        ) from error
    return cast(Backend, getattr(module, known.backend_class)())


def owner(model: object, source: str = "build_model returned") -> str:
    """Return the name of the backend that owns a model; `TaskError` if there is none.

    `source` says in the error where the model is from.
    """
    refuse_keras_2(model)
    known = all_capabilities()
    for parent in type(model).__mro__:
        for name, each in known.items():
            if any(_within(parent.__module__, package) for package in each.model_modules):
                return name
    kind = "None" if model is None else f"a {type(model).__module__}.{type(model).__qualname__}"
    expected = " or ".join(each.model for each in known.values() if each.model)
    raise TaskError(f"{source} {kind}, expected {expected}")


def refuse_keras_2(model: object) -> None:
    """Raise `TaskError` for a model of tf_keras."""
    for parent in type(model).__mro__:
        if _within(parent.__module__, "tf_keras"):
            raise TaskError(
                f"a model of Keras 2 was given ({parent.__module__}), expected one of Keras 3: "
                "import keras instead of tf_keras, and unset TF_USE_LEGACY_KERAS"
            )


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
