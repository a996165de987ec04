"""Lists the backends, and imports one only on request.

A backend is a package with two modules: `capabilities`, which imports no framework, and `backend`.
torch's and Keras's are built in. Other distributions name theirs by an entry point of the group
`autoprec.backends`, which gives the framework's name and the package: `toy = toy_for_autoprec`.
They are read where workers get their environment, where a name is not a built-in one, and where a
model is of no built-in framework; what is wrong with one of them is told to who asks for it.

A model belongs to the framework of the first class in its MRO that a framework defines: a Keras
layer on the torch backend is also an nn.Module, and it is Keras's. The built-in ones come first.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from autoprec.backends.protocol import Backend, Capabilities
from autoprec.errors import FrameworkMissing, TaskError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Each built-in backend's package by the framework's name.
BUILT_IN: dict[str, str] = {
    "torch": "autoprec.backends.torch",
    "keras": "autoprec.backends.keras",
}

#: Where other distributions name their backends.
ENTRY_POINTS = "autoprec.backends"


def capabilities(name: str) -> Capabilities:
    """Return what is known of a framework without importing it.

    Raise `FrameworkMissing` if no backend has this name, or the one that has it cannot be used.
    """
    return _capabilities_in(_package(name))


def built_in() -> Mapping[str, Capabilities]:
    """Return the built-in frameworks' capabilities by name; import none of them."""
    return {name: _capabilities_in(package) for name, package in BUILT_IN.items()}


def all_capabilities() -> Mapping[str, Capabilities]:
    """Return every framework's capabilities by its name; import none of them.

    A backend of another distribution that cannot be used is left out.
    """
    return {**built_in(), **_installed().capabilities}


def load(name: str) -> Backend:
    """Import and build the backend `name`; `FrameworkMissing` if its framework is not installed."""
    package, known = _package(name), capabilities(name)
    for needed in known.required_modules:
        if importlib.util.find_spec(needed) is None:
            wanted = f"autoprec[{known.extra}]" if known.extra else needed
            raise FrameworkMissing(
                f"{name} is not installed here; install it with `pip install '{wanted}'`"
            )
    try:
        module = importlib.import_module(f"{package}.backend")
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
    for list_known in (built_in, all_capabilities):
        known = list_known()
        for parent in type(model).__mro__:
            for name, each in known.items():
                if any(_within(parent.__module__, package) for package in each.model_modules):
                    return name
    kind = "None" if model is None else f"a {type(model).__module__}.{type(model).__qualname__}"
    expected = " or ".join(each.model for each in known.values() if each.model)
    problems = "".join(f"; {each}" for each in _installed().problems.values())
    raise TaskError(f"{source} {kind}, expected {expected}{problems}")


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


def _capabilities_in(package: str) -> Capabilities:
    return cast(Capabilities, importlib.import_module(f"{package}.capabilities").CAPABILITIES)


def _package(name: str) -> str:
    """Return a backend's package, or raise `FrameworkMissing`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    installed = _installed()
    if name in installed.problems:
        raise FrameworkMissing(installed.problems[name])
    if name not in installed.packages:
        expected = ", ".join((*BUILT_IN, *installed.packages))
        raise FrameworkMissing(f"unknown framework {name!r}: expected one of {expected}")
    return installed.packages[name]


@dataclass
class _Installed:
    """The usable backends of other distributions by name, and why other names are not usable."""

    packages: dict[str, str] = field(default_factory=dict)
    capabilities: dict[str, Capabilities] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


@functools.cache
def _installed() -> _Installed:
    """Read the entry points, and import the capabilities of each backend that they name."""
    from importlib.metadata import entry_points

    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINTS):
        points.setdefault(point.name, []).append(point)
    found = _Installed()
    for name, named in points.items():
        whose = " and ".join(f"{point.dist and point.dist.name}" for point in named)
        if name in BUILT_IN:
            found.problems[name] = (
                f"{whose} has a backend {name!r}, which is one of autoprec's own: uninstall {whose}"
            )
        elif len(named) > 1:
            found.problems[name] = f"{whose} each have a backend {name!r}: uninstall all but one"
        else:
            try:
                found.capabilities[name] = _capabilities_in(named[0].module)
                found.packages[name] = named[0].module
            except Exception as error:  # whatever another distribution's code does
                found.problems[name] = (
                    f"the backend {name!r} of {whose} cannot be imported: {type(error).__name__}: "
                    f"{error}; install what is missing, or uninstall {whose}"
                )
    return found
