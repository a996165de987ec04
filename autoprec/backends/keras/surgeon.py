"""Applies a recipe to a Keras model: globally before it is built, or in place afterwards.

Weights, names, the user's optimizer and every other object keep their identity; what a layer
computes in, what wraps the optimizer, and how the train function is compiled change. All of it is
put back by `Precision.restore`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras

from autoprec.backends.keras import loss_scale as scaling
from autoprec.backends.keras.advice import advise
from autoprec.backends.keras.layers import Placed, children, place, resolve
from autoprec.backends.keras.outputs import Float32Outputs, OutputsInFloat32, Wraps
from autoprec.backends.keras.padding import pad_layers
from autoprec.backends.keras.policies import LayerPolicies, global_policy
from autoprec.backends.keras.precision import Applied, Precision
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError

_APPLIED: weakref.WeakKeyDictionary[Any, Precision] = weakref.WeakKeyDictionary()


class KerasSurgeon:
    """Applies recipes to Keras models, on the TensorFlow and the torch backend of Keras."""

    def apply(
        self,
        recipe: Recipe,
        *,
        model: Any = None,
        optimizers: Sequence[Any] = (),
        device: str = "cpu",
    ) -> Precision:
        """Apply `recipe` and return the `Precision` that the training script holds.

        Without a model the global policy is set, for models built from then on; with one, built,
        loaded or compiled, it is changed in place. Applying again first undoes what was applied.
        """
        if keras.config.backend() not in ("tensorflow", "torch"):
            raise UsageError(
                f"Keras runs on {keras.config.backend()!r}; expected 'tensorflow' or 'torch': set "
                "KERAS_BACKEND before importing keras"
            )
        operation = _Operation(recipe, device)
        if model is None:
            return operation.globally(optimizers)
        precision = Precision(recipe)
        operation.on_model(precision, model, optimizers)
        return precision


@dataclass
class _Operation:
    """One recipe being applied."""

    recipe: Recipe
    device: str
    notes: list[str] = field(default_factory=list)

    def globally(self, optimizers: Sequence[Any]) -> Precision:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(
            global_policy(self.recipe.policy, self.recipe.float32_modules)
        )
        precision = Precision(self.recipe, attach_to=self._attach)
        precision._undo.append(lambda: keras.config.set_dtype_policy(before))
        self._settings(precision)
        for optimizer in optimizers:
            precision.wrap(optimizer)
        precision._report = lambda: Applied(
            self.recipe.policy, islands=self.recipe.float32_modules, warnings=tuple(self.notes)
        )
        return precision

    def _attach(self, precision: Precision, model: Any, optimizers: Sequence[Any]) -> None:
        self.on_model(precision, model, optimizers)
        precision.attach_to = None

    def on_model(self, precision: Precision, model: Any, optimizers: Sequence[Any]) -> None:
        if not isinstance(model, keras.Layer):
            raise UsageError(
                f"model: {type(model).__name__} given, expected a keras.Model or keras.Layer"
            )
        former = _APPLIED.pop(model, None)
        if former is not None:
            former.restore()
        if precision.attach_to is None:
            self._settings(precision)
        with _scope_of(model):
            self._policies(precision, model)
            self._optimizers(precision, model, optimizers)
        self._train_function(precision, model)
        precision.model = model
        _APPLIED[model] = precision

    def _policies(self, precision: Precision, model: Any) -> None:
        placed = place(model)
        policy = self.recipe.policy
        islands = resolve(self.recipe.float32_modules, placed) if policy.mixed else ()
        policies, wraps = LayerPolicies(), Wraps()
        precision._undo += [policies.restore, wraps.restore]
        padded, not_padded = pad_layers(placed, self.recipe.alignment, wraps)
        kept = policies.apply(placed, policy, islands)
        for island in islands:
            _lift_own_code(island, islands, wraps)
        outputs = OutputsInFloat32(policies, wraps)
        if policy.mixed:
            outputs.apply(placed)
            _add_losses_in_float32(model, wraps)
        self.notes += advise(self.recipe, placed, self.device, islands)
        named = tuple(unit.path for unit in islands)
        precision._report = lambda: Applied(
            policy,
            layers=len(placed),
            islands=(*named, *(path for path in outputs.islands if path not in named)),
            kept=tuple(unit.path for unit in kept),
            padded=padded,
            not_padded=not_padded,
            warnings=tuple(self.notes),
        )

    def _optimizers(self, precision: Precision, model: Any, optimizers: Sequence[Any]) -> None:
        own: Any = getattr(model, "optimizer", None)
        candidates = [*([] if own is None else [own]), *optimizers, *precision.optimizers]
        if optimizers:
            candidates = [*optimizers, *candidates]
        wrapped: dict[int, Any] = {}
        for optimizer in candidates:
            inner = scaling.innermost(optimizer)
            if id(inner) not in wrapped:
                wrapped[id(inner)] = precision.wrap(optimizer)
        precision.optimizers = tuple(wrapped.values())
        for first in precision.optimizers[:1]:
            precision._start = int(scaling.value_of(scaling.innermost(first)._iterations))
        _count_losses(precision)
        if own is not None:
            set_optimizer(model, wrapped[id(scaling.innermost(own))])
            precision._undo.append(lambda: set_optimizer(model, own))

    def _train_function(self, precision: Precision, model: Any) -> None:
        if not getattr(model, "compiled", False):
            return
        before = (model.jit_compile, model.steps_per_execution)
        steps = self.recipe.knobs.get("steps_per_execution", model.steps_per_execution)
        if keras.config.backend() == "torch" and steps != 1:
            steps = 1
            self.notes.append("steps_per_execution was left at 1: Keras on torch has no other")
        _compile_settings(model, self.recipe.compile, steps)
        _watch(precision, model)

        def undo() -> None:
            _compile_settings(model, *before)

        precision._undo.append(undo)

    def _settings(self, precision: Precision) -> None:
        """Set what is global to the process: threads, and TF32 on a GPU."""
        if keras.config.backend() != "tensorflow":
            return
        import tensorflow as tf

        threads = self.recipe.knobs.get("threads")
        if (
            threads is not None
            and tf.config.threading.get_intra_op_parallelism_threads() != threads
        ):
            try:
                tf.config.threading.set_intra_op_parallelism_threads(int(threads))
            except RuntimeError:
                self.notes.append(
                    f"{threads} intra-op threads were asked for after TensorFlow had started; "
                    "apply the profile first thing in the script, or set TF_NUM_INTRAOP_THREADS="
                    f"{threads}"
                )
        if self.device != "cpu" and self.recipe.policy in (Policy.FLOAT32, Policy.TF32):
            execution = tf.config.experimental
            before = execution.tensor_float_32_execution_enabled()
            execution.enable_tensor_float_32_execution(self.recipe.policy is Policy.TF32)
            precision._undo.append(lambda: execution.enable_tensor_float_32_execution(before))


def _lift_own_code(island: Placed, islands: Sequence[Placed], wraps: Wraps) -> None:
    """Let a container compute its own code in float32 on what its 16-bit layers give it."""
    if len(island.members) > 1:
        return
    inside = {id(other.layer) for other in islands}
    for child in children(island.layer):
        if id(child) not in inside and child.compute_dtype != "float32":
            wraps.install(child, "call", Float32Outputs(child, child.call))


def _add_losses_in_float32(model: Any, wraps: Wraps) -> None:
    """Cast what layers add to the loss: Keras cannot sum 16-bit terms with the float32 loss."""
    if hasattr(model, "_aggregate_additional_loss"):
        aggregate = model._aggregate_additional_loss
        wraps.install(model, "_aggregate_additional_loss", Float32Outputs(model, aggregate))


def _count_losses(precision: Precision) -> None:
    """Count losses that are not finite; on several replicas a variable could not be shared."""
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            return
    wraps = Wraps()
    precision._nonfinite = keras.Variable(0, dtype="int64", trainable=False, name="broken_losses")
    for optimizer in precision.optimizers:
        counted = scaling.CountedLoss(optimizer.scale_loss, precision._nonfinite)
        wraps.install(optimizer, "scale_loss", counted)
    precision._undo.append(wraps.restore)


def set_optimizer(model: Any, optimizer: Any) -> None:
    """Make `optimizer` the compiled model's own, also in what a .keras file will say."""
    model.optimizer = optimizer
    compiled = getattr(model, "_compile_config", None)
    if compiled is not None:
        compiled.config["optimizer"] = optimizer
    _remake(model)


def _compile_settings(model: Any, jit_compile: bool, steps_per_execution: Any) -> None:
    model.jit_compile = jit_compile
    model.steps_per_execution = steps_per_execution
    compiled = getattr(model, "_compile_config", None)
    if compiled is not None:
        compiled.config["jit_compile"] = model.jit_compile
        compiled.config["steps_per_execution"] = steps_per_execution
    _remake(model)


def _remake(model: Any) -> None:
    """Make Keras trace its functions again: those it has hold the old policies."""
    model.make_train_function(force=True)
    model.test_function = None
    model.predict_function = None


def _scope_of(model: Any) -> AbstractContextManager[Any]:
    """The strategy's scope that `model` was made under, for the variables that wrappers add."""
    strategy = getattr(model, "_distribute_strategy", None)
    return nullcontext() if strategy is None else strategy.scope()


def _watch(precision: Precision, model: Any) -> None:
    """Look for a scale at its floor now and then, from the host, while `fit` runs."""
    if precision.loss_scale is not None and model.train_function is not None:
        model.train_function = _Watched(model.train_function, weakref.ref(precision))


@dataclass
class _Watched:
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
