"""Applies a recipe to a Keras model: before it is built, or in place afterwards.

Weights, names, the user's optimizer and every other object keep their identity; what a layer
computes in, what wraps the optimizer, and how the train function is compiled change. All of it is
put back by `Precision.restore`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from autoprec.backends.keras.apply.follow_model import NewModels
from autoprec.backends.keras.apply.hooks import NewObjects
from autoprec.backends.keras.apply.layer_names import place
from autoprec.backends.keras.apply.layer_policies import in_place_of
from autoprec.backends.keras.apply.operation import PLACE, ModelOperation, release
from autoprec.backends.keras.apply.optimizers import optimizers_of
from autoprec.backends.keras.apply.policies import keras_name
from autoprec.backends.keras.apply.precision import Applied, Precision
from autoprec.backends.keras.apply.preprocessing_layers import is_preprocessing
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe

#: Ends the watch for new models that is kept, if one is: there is one global policy.
_STOP: list[Callable[[], None]] = []


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

        With a model, built, loaded or compiled or none of these yet, it is changed in place.
        Without one the global policy is set, and every model made from then on is changed in place
        when it is compiled or first called. Applying again first undoes what was applied.
        """
        if model is None:
            return _to_models_to_come(recipe, device, optimizers)
        precision = Precision(recipe)
        operation = ModelOperation(precision, model, device, given=optimizers)
        precision.at_work_on(operation, keep=True)
        try:
            _settings(precision)
            operation.apply()
        except BaseException:
            precision.restore()
            raise
        return precision

    def leave(
        self,
        recipe: Recipe,
        *,
        model: Any = None,
        optimizers: Sequence[Any] = (),
        device: str = "cpu",
    ) -> Precision:
        """See `Surgeon.leave`. The optimizer accumulates nothing, so the whole batch is one step's.

        Without a model the watch for models to come ends, and the global policy is put back.
        """
        precision = Precision(
            replace(recipe, batch_size=recipe.effective_batch, accumulation_steps=1)
        )

        def know(model: Any, given: Sequence[Any] = ()) -> None:
            vars(model)[PLACE] = left = _LeftAlone(model, tuple(given))
            precision.at_work_on(left, keep=False)
            precision.count_from_here()

        if model is None:
            while _STOP:
                _STOP.pop()()
            precision._loose += optimizers
            watch = NewModels(know)
            _STOP.append(watch.stop)
            precision._undo.append(watch.stop)
            precision.count_from_here()
            return precision
        for unit in place(model):
            if unit.layer is model or not getattr(unit.layer, "compiled", False):
                release(unit.layer)
        know(model, optimizers)
        return precision


@dataclass(eq=False)
class _LeftAlone:
    """A model and optimizers that nothing is done to; see `OnModel`."""

    model: Any
    given: tuple[Any, ...]
    nonfinite: Any = None

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Return the script's own, as they are, and those that the model holds by now."""
        return (*self.given, *optimizers_of(self.model))

    @property
    def report(self) -> Applied:
        """Return an empty report: nothing was changed."""
        return Applied(Policy.FLOAT32)

    def restore(self) -> None:
        """Do nothing: there is nothing to put back."""


def _to_models_to_come(recipe: Recipe, device: str, optimizers: Sequence[Any]) -> Precision:
    """Set the global policy, and apply the recipe to each model as it comes."""
    while _STOP:
        _STOP.pop()()
    before = keras.config.dtype_policy()
    ours = in_place_of(before, keras_name(recipe.policy))
    prepares = in_place_of(before, "float32")
    keras.config.set_dtype_policy(ours)

    def prepare(layer: Any) -> None:
        """Keep float32 what may be adapted, or used in a dataset, before there is a model."""
        if layer.dtype_policy is ours and is_preprocessing(layer):
            layer.dtype_policy = prepares

    def attach(precision: Precision, model: Any, given: Sequence[Any]) -> ModelOperation:
        operation = ModelOperation(precision, model, device, given=given, tolerant=True).apply()
        operation.warn()
        return operation

    precision = Precision(recipe, attach_to=attach)
    watches = NewModels(precision.attach), NewObjects(keras.Layer, prepare)

    def stop() -> None:
        for watch in watches:
            watch.stop()
        if keras.config.dtype_policy() is ours:
            keras.config.set_dtype_policy(before)

    _STOP.append(stop)
    precision._undo.append(stop)
    _settings(precision)
    for optimizer in optimizers:
        precision.wrap(optimizer)
    return precision


def _settings(precision: Precision) -> None:
    """Set what is global to the process: threads, and TF32 under its policy."""
    if keras.config.backend() != "tensorflow":
        return
    import tensorflow as tf

    recipe = precision.recipe
    threads = recipe.knobs.get("threads")
    if threads is not None and tf.config.threading.get_intra_op_parallelism_threads() != threads:
        try:
            tf.config.threading.set_intra_op_parallelism_threads(int(threads))
        except RuntimeError:
            precision.notes.append(
                f"{threads} intra-op threads were asked for after TensorFlow had started; "
                "apply the profile first thing in the script, or set TF_NUM_INTRAOP_THREADS="
                f"{threads}"
            )
    execution = tf.config.experimental
    if recipe.policy is Policy.TF32 and not execution.tensor_float_32_execution_enabled():
        execution.enable_tensor_float_32_execution(True)
        precision._undo.append(lambda: execution.enable_tensor_float_32_execution(False))
