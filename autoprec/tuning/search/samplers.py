"""Proposes recipes where the cost model does not: Optuna's samplers, or the whole grid in order.

By default `core.speed.acquisition` proposes them all, and none of this is asked.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

from autoprec.core.speed.acquisition import Next
from autoprec.core.speed.space import BATCH, Space, point_key
from autoprec.core.speed.stopping import OUT_OF_TIME, Limits, Stop, trial_limit_reached
from autoprec.core.speed.trial_results import Outcome
from autoprec.errors import UsageError

#: Trials of Optuna's samplers where `trials` is not set.
_DEFAULT_TRIALS = 40

#: A sampler that proposes known points this many times in a row proposes nothing new.
_MAX_REPEATS = 20

#: Trials that TPE draws at random before it models anything.
_TPE_STARTUP_TRIALS = 6


def sampler_of(name: str, seed: int) -> Any:
    """Return Optuna's sampler of a short name, or any other by its import path.

    It is given the seed if it takes one. Raises `UsageError` if there is no such sampler, or if it
    cannot be made.
    """
    import optuna

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
            return found(**seeded)
    except (ImportError, TypeError, ValueError) as error:
        raise _refusal(name, f"it cannot be made: {error}") from error


def _refusal(name: str, why: str) -> UsageError:
    return UsageError(
        f"`sampler={name}`: {why}; expected a sampler that is made without arguments, by its "
        "import path such as optuna.samplers.GPSampler, or one of cost, tpe, grid, random"
    )


def next_of_sampler(
    name: str, space: Space, history: Sequence[Outcome], limits: Limits, repeats: int
) -> Next | Stop:
    """Return what a sampler, or the grid, has tried next; or why to stop.

    A sampler may propose anything, at worst the slowest recipe again. `repeats` is how many times
    in a row it has proposed what was known.
    """
    steps = [each.measurement.step_seconds for each in history if each.measurement is not None]
    if not all(map(limits.ends_in_time, steps)):
        return OUT_OF_TIME
    if name == "grid":
        return _next_of_grid(space, history, limits)
    count = limits.trials or _DEFAULT_TRIALS
    if len(history) >= count:
        return Stop(f"the limit of {count} trials is reached")
    if repeats > _MAX_REPEATS or len(history) >= len(space.points()):
        return Stop(f"{name} proposes nothing new")
    return Next(None, f"proposed by {name}")


def _next_of_grid(space: Space, history: Sequence[Outcome], limits: Limits) -> Next | Stop:
    """Return the grid's next recipe, small batches first, to learn what does not fit in memory."""
    tried = {point_key(outcome.point) for outcome in history}
    points = sorted(space.points(), key=lambda point: int(point[BATCH]))
    left = [point for point in points if point_key(point) not in tried]
    if not left:
        return Stop("the grid is measured")
    stop = trial_limit_reached(len(history), limits)
    return stop or Next(left[0], f"{len(left)} recipes of the grid are left")
