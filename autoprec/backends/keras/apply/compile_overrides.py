"""What a recipe changes in what a model's `compile` sets: its optimizers and its train function.

A later `compile` sets it anew, so it is undone before and done again after. The train function runs
by XLA or not, some steps in an execution, and looks at the loss scale's counters now and then.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from autoprec.backends.keras.apply import optimizer_saving, optimizer_wrapping
from autoprec.backends.keras.apply.accumulation import AccumulatingOptimizer, FinalizeHook
from autoprec.backends.keras.apply.layer_policy_stack import own_policy
from autoprec.backends.keras.apply.loss_scaler import LossCountingHook
from autoprec.backends.keras.apply.method_hooks import InstalledHooks
from autoprec.backends.keras.apply.metrics import RealSamplesHook, hookable_metrics
from autoprec.backends.keras.apply.optimizer_attributes import (
    optimizer_attributes,
    optimizers_of,
    replace_optimizers,
)
from autoprec.backends.keras.apply.precision import Precision
from autoprec.backends.keras.apply.replicas import (
    ReplicaShares,
    can_be_weighed,
    reduce_before_clipping,
    refuse_fit_over_processes,
    replica_count,
    scope_of,
)
from autoprec.errors import AutoprecWarning

#: How many executions pass until it is said that no update went through an optimizer.
_LOOKED_AT = 3


class CompileOverrides:
    """The optimizers, metrics and train function of one model under a recipe.

    `given` are optimizers of the script that the model does not hold.
    """

    def __init__(self, precision: Precision, model: Any, given: Sequence[Any]) -> None:
        self.model = model
        self.optimizers: tuple[Any, ...] = ()
        self.nonfinite: Any = None
        self.notes: list[str] = []
        self._precision, self._recipe = precision, precision.recipe
        self._given = tuple(given)
        self._hooks = InstalledHooks()
        self._undo: list[Callable[[], None]] = []

    def apply(self) -> None:
        """Carry the recipe into what `compile` has set."""
        self._wrap_optimizers()
        metrics = hookable_metrics(self.model)
        if metrics is not None:
            hook = RealSamplesHook(metrics.update_state, metrics)
            self._hooks.install(metrics, "update_state", hook)
        if getattr(self.model, "compiled", False):
            self._set_train_function()

    def undo(self) -> None:
        """Put back what was changed, but for what the script has changed itself since."""
        self._hooks.restore()
        while self._undo:
            self._undo.pop()()

    def _wrap_optimizers(self) -> None:
        held = [self._as_given_to_compile(optimizer) for optimizer in optimizers_of(self.model)]
        wrapped: dict[int, Any] = {}
        for optimizer in (*self._given, *held):
            inner = id(optimizer_saving.innermost_optimizer(optimizer))
            wrapped[inner] = wrapped.get(inner) or self._precision.wrapped(optimizer)
        self.optimizers = tuple(wrapped.values())
        self._prepare_for_replicas()
        self._count_losses()
        for name in optimizer_attributes(self.model):
            self._hold_wrapped(name, wrapped)
        self._flush_when_fit_ends()

    def _as_given_to_compile(self, optimizer: Any) -> Any:
        """Return what the user gave to `compile`, without the loss scale Keras may have added.

        Keras adds one where the model's policy is mixed_float16, and files name it only where the
        user did; their state must be what they name.
        """
        config = getattr(self.model, "_compile_config", None)
        said = None if config is None else config.config.get("optimizer")
        added = (
            optimizer is getattr(self.model, "optimizer", None)
            and type(optimizer) is keras.optimizers.LossScaleOptimizer
            and said is not optimizer
        )
        return optimizer.inner_optimizer if added else optimizer

    def _hold_wrapped(self, name: str, wrapped: Mapping[int, Any]) -> None:
        """Make the model hold wrapped optimizers where it held the user's."""
        ours = own_policy(self.model).name != "mixed_float16"
        back: dict[int, tuple[Any, Any]] = {}

        def wrap(held: Any) -> Any:
            found = wrapped[id(optimizer_saving.innermost_optimizer(held))]
            if found is not held:
                back[id(found)] = found, self._as_given_to_compile(held) if ours else held
            return found

        def undo() -> None:
            for ours, given in back.values():
                optimizer_wrapping.unwrap(ours, given)
            self._replace_in_attribute(name, lambda held: back.get(id(held), (held, held))[1])

        self._replace_in_attribute(name, wrap)
        if back:
            self._undo.append(undo)

    def _replace_in_attribute(self, name: str, change: Callable[[Any], Any]) -> None:
        """Exchange the optimizers in an attribute of the model."""
        held = vars(self.model).get(name)
        now = replace_optimizers(held, change)
        if now is not held:
            setattr(self.model, name, now)
            retrace_functions(self.model)

    def _flush_when_fit_ends(self) -> None:
        """Flush every optimizer where Keras finalizes the compiled one alone."""
        compiled = getattr(self.model, "optimizer", None)
        found = (
            optimizer_wrapping.find_wrapper(o, AccumulatingOptimizer)
            for o in self.optimizers
            if o is not compiled
        )
        others = [each for each in found if each is not None]
        if compiled is not None and others:
            hook = FinalizeHook(compiled.finalize_variable_values, others)
            self._hooks.install(compiled, "finalize_variable_values", hook)

    def _prepare_for_replicas(self) -> None:
        """Weigh the replicas' losses, and make the variables that no replica can make in a step."""
        if replica_count(self.model) == 1:
            return
        if len(self._given) == 1 and self.model.built and not self.optimizers[0].built:
            self.optimizers[0].build(self.model.trainable_variables)
        refuse_fit_over_processes(self.model, self._hooks)
        for optimizer in self.optimizers:
            reduce_before_clipping(optimizer_saving.innermost_optimizer(optimizer), self._hooks)
        if can_be_weighed(self.model):
            ReplicaShares(self.model).install(self._hooks, self.optimizers)

    def _count_losses(self) -> None:
        """Count losses that are not finite, on every replica."""
        if not self.optimizers:
            return
        if self.nonfinite is None:
            self.nonfinite = keras.Variable(
                0,
                dtype="int64",
                trainable=False,
                aggregation="sum",
                synchronization="on_read",
                name="broken_losses",
            )
        for optimizer in self.optimizers:
            counted = LossCountingHook(optimizer.scale_loss, self.nonfinite)
            self._hooks.install(optimizer, "scale_loss", counted)

    def _set_train_function(self) -> None:
        model, recipe = self.model, self._recipe
        before = (model.jit_compile, model.steps_per_execution)
        steps = recipe.knobs.get("steps_per_execution", model.steps_per_execution)
        obstacle = _single_step_reason(model)
        if obstacle and steps != model.steps_per_execution:
            steps = model.steps_per_execution
            self._say(f"steps_per_execution stays {steps}: {obstacle}")
        compiles = model.jit_compile or (recipe.compile and not model.run_eagerly)
        if compiles and not model.jit_compile and replica_count(model) > 1:
            compiles = False
            self._say("not compiled: TensorFlow cannot compile a step of several replicas with XLA")
        _compile_settings(model, compiles, steps)
        _wrap_train_function(self._precision, model)
        after = (model.jit_compile, model.steps_per_execution)

        def undo() -> None:
            now = (model.jit_compile, model.steps_per_execution)
            pairs = zip(now, after, before, strict=True)
            _compile_settings(
                model, *(given if held == ours else held for held, ours, given in pairs)
            )

        self._undo.append(undo)

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _single_step_reason(model: Any) -> str:
    """Say why a model can take but one step in an execution; empty if it can take more."""
    if keras.config.backend() == "torch":
        return "Keras on torch supports no other value"
    if replica_count(model) > 1:
        return "with more, TensorFlow fails on several replicas"
    return ""


# The train function -------------------------------------------------------------------------------


def _compile_settings(model: Any, jit_compile: bool, steps_per_execution: Any) -> None:
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


def _wrap_train_function(precision: Precision, model: Any) -> None:
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
