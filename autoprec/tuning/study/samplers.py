"""Which sampler of Optuna asks: the one of a short name, or any other by its import path.

It imports Optuna, and is itself imported where a study asks.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import optuna

from autoprec.errors import UsageError

#: Trials that TPE draws at random before it models anything.
_TPE_STARTUP_TRIALS = 6


def sampler_of(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Return a sampler; an import path's is given the seed where it takes one.

    Raises `UsageError` where there is no such sampler, or where it cannot be made.
    """
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if "." not in name:  # cost and grid ask by point
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=_TPE_STARTUP_TRIALS)
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise _refusal(name, str(error)) from error
    if not (isinstance(found, type) and issubclass(found, optuna.samplers.BaseSampler)):
        raise _refusal(name, "it is no subclass of optuna.samplers.BaseSampler")
    seeded = {"seed": seed} if "seed" in inspect.signature(found).parameters else {}
    try:
        with warnings.catch_warnings():  # whoever names an experimental one knows that
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            made: optuna.samplers.BaseSampler = found(**seeded)
    except (ImportError, TypeError, ValueError) as error:
        raise _refusal(name, f"it cannot be made: {error}") from error
    return made


def _refusal(name: str, why: str) -> UsageError:
    return UsageError(
        f"`sampler={name}`: {why}; expected a sampler that is made without arguments, by its "
        "import path such as optuna.samplers.GPSampler, or one of cost, tpe, grid, random"
    )
