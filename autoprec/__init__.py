"""Measure which training precision is fastest on this device, check it, and apply it.

    autoprec probe
    autoprec tune model.py
    from autoprec import apply_profile

Importing this package imports no framework: every name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autoprec.version import __version__

if TYPE_CHECKING:
    from autoprec.api import (
        apply_profile,
        distribute,
        load_profile,
        log_to,
        probe,
        report,
        tune,
        verify,
    )
    from autoprec.core.dtypes import Policy
    from autoprec.core.profile import Profile
    from autoprec.core.recipe import Recipe
    from autoprec.errors import AutoprecError

_HOMES = {
    "Policy": "core.dtypes",
    "Profile": "core.profile",
    "Recipe": "core.recipe",
    "AutoprecError": "errors",
    **dict.fromkeys(("apply_profile", "distribute"), "applying"),
}

__all__ = [
    "AutoprecError",
    "Policy",
    "Profile",
    "Recipe",
    "__version__",
    "apply_profile",
    "distribute",
    "load_profile",
    "log_to",
    "probe",
    "report",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'autoprec' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"autoprec.{_HOMES.get(name, 'api')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
