"""How a compiled model runs its steps: XLA, steps per execution, and a look at the counters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from autoprec.backends.keras.apply.precision import Precision
from autoprec.backends.keras.apply.replicas import replica_count, scope_of


def compile_settings(model: Any, jit_compile: bool, steps_per_execution: Any) -> None:
    """Set how the train function is compiled; what a file says of it stays the user's own."""
    model.jit_compile = jit_compile
    model.steps_per_execution = steps_per_execution
    retrace_functions(model)


def retrace_functions(model: Any, *, watched: bool = False) -> None:
    """Make Keras trace its functions again: those it has hold the old policies.

    With `watched`, a look at the counters that was put into one stays. None is left out: a callback
    of `fit` may be what applies a recipe.
    """
    for kind in ("train", "test", "predict"):
        held = vars(model).get(f"{kind}_function")
        if held is None:
            continue
        getattr(model, f"make_{kind}_function")(force=True)
        if watched and isinstance(held, _CheckingTrainFunction):
            held.function, model.train_function = model.train_function, held


def watch_train_function(precision: Precision, model: Any) -> None:
    """Look for a scale at its floor, and check batches, now and then while `fit` runs.

    An optimizer that is not built is built before the first step: TensorFlow traces a function anew
    that has made variables.
    """
    if precision.policy.mixed or _waits_for_first_step(model):
        model.make_train_function()
        model.train_function = _CheckingTrainFunction(
            model.train_function, weakref.ref(precision), weakref.ref(model)
        )


def _waits_for_first_step(model: Any) -> bool:
    """Say whether it is the first compiled step of Keras's own that builds the optimizer."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built or keras.config.backend() != "tensorflow":
        return False
    own_step = getattr(type(model), "train_step", None) is keras.Model.train_step
    return own_step and not model.run_eagerly and replica_count(model) == 1


def _build_optimizer(model: Any) -> None:
    """Build the optimizer as the first step would, where the weights are known before it."""
    layers = model._flatten_layers()
    if _waits_for_first_step(model) and all(layer.built for layer in layers):
        with scope_of(model):
            model.optimizer.build(model.trainable_variables)
        model.optimizer.built = True


@dataclass
class _CheckingTrainFunction:
    """A train function that lets the precision look at its counters every few executions."""

    function: Callable[[Any], Any]
    precision: weakref.ref[Precision]
    model: weakref.ref[Any]
    every: int = 16
    calls: int = 0

    def __call__(self, iterator: Any) -> Any:
        precision, model = self.precision(), self.model()
        if self.calls == 0 and model is not None:
            _build_optimizer(model)
        watch = None if precision is None else precision.watcher
        if watch is not None and model is not None:
            iterator = watch.before_execution(model, iterator)
        logs = self.function(iterator)
        self.calls += 1
        if precision is None or precision.loss_scale is None:
            return logs
        if self.calls <= self.every or self.calls % self.every == 0:
            precision.check()
        return logs
