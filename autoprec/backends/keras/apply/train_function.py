"""How a compiled model runs its steps: XLA, steps per execution, and a look at the counters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoprec.backends.keras.apply.precision import Precision


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


def watch_scale_floor(precision: Precision, model: Any) -> None:
    """Look for a scale at its floor now and then, from the host, while `fit` runs."""
    if precision.loss_scale is not None:
        model.make_train_function()
        model.train_function = _CheckingTrainFunction(model.train_function, weakref.ref(precision))


@dataclass
class _CheckingTrainFunction:
    """A train function that lets the precision look at its counters every few executions."""

    function: Callable[[Any], Any]
    precision: weakref.ref[Precision]
    every: int = 16
    calls: int = 0

    def __call__(self, iterator: Any) -> Any:
        logs = self.function(iterator)
        self.calls += 1
        precision = self.precision()
        if precision is not None and (self.calls <= self.every or self.calls % self.every == 0):
            precision.check()
        return logs
