"""How a compiled model runs its steps: XLA, steps per execution, and a look at the counters."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from autoprec.backends.keras.apply.precision import Precision
from autoprec.backends.keras.apply.replicas import replica_count, scope_of
from autoprec.errors import AutoprecWarning

#: How many executions pass until it is said that no update went through an optimizer.
_LOOKED_AT = 3


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


def _needs_its_optimizer(precision: Precision) -> bool:
    return precision.loss_scale is not None or precision.recipe.accumulation_steps > 1


class _UpdatesByHand:
    """Looks whether the first executions change weights without an optimizer of the profile.

    It is the smallest weight that is looked at.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._before = self._value()

    def _value(self) -> Any:
        model = self._model()
        weights = [] if model is None else [v for v in model.trainable_variables if v.shape]
        found = min(weights, key=lambda v: math.prod(v.shape), default=None)
        return None if found is None else keras.ops.convert_to_numpy(found)

    def warn(self, precision: Precision) -> None:
        """Warn if there were some, and no other updates."""
        counts, now = precision.counts, self._value()
        if counts.steps or counts.skipped or self._before is None or now is None:
            return
        if now.shape == self._before.shape and not (now == self._before).all():
            warnings.warn(
                "train_step changes weights by itself, past the profile's optimizer: the loss is "
                "not scaled, an update that overflows is not skipped, and nothing is accumulated. "
                "In train_step use loss = self.optimizer.scale_loss(loss) inside the tape, and "
                "self.optimizer.apply_gradients(zip(gradients, self.trainable_variables)); or "
                "choose mixed_bfloat16 (silence: warnings.simplefilter('ignore', AutoprecWarning))",
                AutoprecWarning,
                stacklevel=3,
            )


@dataclass
class _CheckingTrainFunction:
    """A train function that lets the precision look at its counters every few executions."""

    function: Callable[[Any], Any]
    precision: weakref.ref[Precision]
    model: weakref.ref[Any]
    every: int = 16
    calls: int = 0
    by_hand: _UpdatesByHand | None = None

    def __call__(self, iterator: Any) -> Any:
        precision, model = self.precision(), self.model()
        if self.calls == 0 and model is not None:
            _build_optimizer(model)
        watch = None if precision is None else precision.watcher
        if watch is not None and model is not None:
            iterator = watch.before_execution(model, iterator)
        logs = self.function(iterator)
        self.calls += 1
        if precision is not None and model is not None and self.calls <= _LOOKED_AT:
            self._look_for_updates_by_hand(precision, model)
        if precision is None or precision.loss_scale is None:
            return logs
        if self.calls <= self.every or self.calls % self.every == 0:
            precision.check()
        return logs

    def _look_for_updates_by_hand(self, precision: Precision, model: Any) -> None:
        if self.calls == 1 and _needs_its_optimizer(precision):
            self.by_hand = _UpdatesByHand(model)  # a model without a graph has its weights by now
        elif self.calls == _LOOKED_AT and self.by_hand is not None:
            self.by_hand.warn(precision)
            self.by_hand = None
