"""What was traced before a recipe was applied or taken back, and would go on as it was traced.

The functions that Keras makes of a model's steps are made anew, as by `compile`. Those of a script
cannot be, and are warned of.
"""

from __future__ import annotations

import functools
import gc
import warnings
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer

from autoprec.backends.keras.apply.compile_overrides import retrace_functions
from autoprec.backends.keras.apply.replicas import replica_count
from autoprec.errors import AutoprecWarning

#: Whose functions are no script's.
_LIBRARIES = ("keras", "tensorflow", "autoprec")


def trace_again(model: Any, *, warn: bool = False, watched: bool = False) -> list[Any]:
    """Make Keras trace again what it did of a model and of those that share layers with it.

    With `warn`, say which functions of the script were traced with the model's weights; with
    `watched`, a look at the model's counters stays. Returns the models of this process.
    """
    models, functions = _alive()
    retrace_functions(model, watched=watched)
    inside = model._flatten_layers(include_self=False)
    layers = {id(each) for each in (model, *inside)}
    others = [each for each in models if each is not model and _holds(each, layers)]
    for each in (*inside, *others):
        retrace_functions(each, watched=True)
    if warn and keras.config.backend() == "tensorflow" and replica_count(model) == 1:
        weights = {id(variable._value.handle) for variable in model.trainable_variables}
        if _named(functions, weights):
            del functions
            gc.collect()  # what the script has no more is still there until then
            found = _named(_alive()[1], weights)
            _warn(model, found)
    return models


def trace_training_again() -> None:
    """Make Keras trace every model's training step again, so that its updates can be looked at."""
    for model in _alive()[0]:
        if vars(model).get("train_function") is not None:
            retrace_functions(model, watched=True)


def _alive() -> tuple[list[Any], list[Any]]:
    """List the models of this process, and what was given to tf.function."""
    kinds: dict[type, list[Any] | None] = {}
    models: list[Any] = []
    functions: list[Any] = []
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        kinds[type(tf.function(_alive))] = functions
    for each in gc.get_objects():
        kind = type(each)  # not __class__, which may be a proxy's
        if kind not in kinds:
            kinds[kind] = models if issubclass(kind, Trainer) else None
        kept = kinds[kind]
        if kept is not None:
            kept.append(each)
    return models, functions


def _holds(outer: Any, layers: set[int]) -> bool:
    made = vars(outer).get("built", False)
    return made and any(id(each) in layers for each in outer._flatten_layers(include_self=False))


def _named(functions: list[Any], weights: set[int]) -> list[str]:
    """Name the functions of the script of which a trace reads one of the weights."""
    found = set()
    for function in functions:
        given = function.python_function
        while isinstance(given, functools.partial):
            given = given.func
        if str(getattr(given, "__module__", "")).partition(".")[0] in _LIBRARIES:
            continue
        traces = function._list_all_concrete_functions()
        if any(weights & set(map(id, trace.captured_inputs)) for trace in traces):
            found.add(str(getattr(given, "__name__", type(given).__name__)))
    return sorted(found)


def _warn(model: Any, found: list[str]) -> None:
    if found:
        were, go = ("was", "goes") if len(found) == 1 else ("were", "go")
        warnings.warn(
            f"{', '.join(found)} {were} traced by tf.function before the profile was applied to "
            f"{model.name}, and {go} on without it. Call apply_profile first, or make and call "
            "such functions only after it",
            AutoprecWarning,
            stacklevel=6,
        )
