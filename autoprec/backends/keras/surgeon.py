"""Applies a recipe to a Keras model: before it is built, or in place afterwards.

Weights, names, the user's optimizer and every other object keep their identity; what a layer
computes in, what wraps the optimizer, and how the train function is compiled change. All of it is
put back by `Precision.restore`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from autoprec.backends.keras.apply.applied_recipe import (
    RECIPE_ATTRIBUTE,
    AppliedRecipe,
    undo_former_recipe,
)
from autoprec.backends.keras.apply.dtype_policies import keras_name
from autoprec.backends.keras.apply.earlier_traces import trace_training_again
from autoprec.backends.keras.apply.layer_names import layer_units, own_steps
from autoprec.backends.keras.apply.layer_policy_stack import policy_replacing
from autoprec.backends.keras.apply.lifecycle_hooks import NewModels
from autoprec.backends.keras.apply.method_hooks import Hook, NewObjects, remove_hook
from autoprec.backends.keras.apply.optimizer_attributes import optimizers_of
from autoprec.backends.keras.apply.optimizer_saving import innermost_optimizer
from autoprec.backends.keras.apply.precision import Applied, AppliedToModel, Precision
from autoprec.backends.keras.apply.preprocessing_layers import is_preprocessing
from autoprec.backends.keras.apply.replicas import fit_to_replicas, refuse_keras_distribution
from autoprec.backends.keras.apply.unreached_updates import UnreachedUpdates
from autoprec.backends.keras.watch.watch import Watch
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.watch_settings import Action
from autoprec.errors import AutoprecWarning

#: Stops following new models, if they are followed: there is one global policy.
_STOP_FOLLOWING: list[Callable[[], None]] = []

#: Where a model is known to a profile of the script's own, which stands aside for a tuning's.
_ASIDE_ATTRIBUTE = "_autoprec_aside"


class KerasSurgeon:
    """Applies recipes to Keras models, on the TensorFlow and the torch backend of Keras."""

    def apply(
        self,
        recipe: Recipe,
        *,
        model: Any = None,
        optimizers: Sequence[Any] = (),
        device: str = "cpu",
        facts: DeviceFacts | None = None,
    ) -> Precision:
        """Apply `recipe` and return the `Precision` that the training script holds.

        With a model, built, loaded or compiled or none of these yet, it is changed in place.
        Without one the global policy is set, and every model made from then on is changed in place
        when it is compiled or first called. Applying again first undoes what was applied. With the
        device's `facts`, sizes off its alignment are among the warnings.
        """
        refuse_keras_distribution()
        if model is None:
            return _apply_to_future_models(recipe, facts, optimizers)
        precision = Precision(recipe)
        _fit_to_replicas(precision, model)
        operation = AppliedRecipe(precision, model, facts, given=optimizers)
        precision.register(operation, keep=True)
        try:
            _apply_process_settings(precision)
            operation.apply()
        except BaseException:
            precision.restore()
            raise
        precision._undo.append(UnreachedUpdates(precision).stop)
        return precision

    def watch(
        self, precision: Precision, *, model: Any, device: str, action: Action, every: int
    ) -> None:
        """See `WatchingSurgeon.watch`."""
        precision.watcher = Watch(precision, action=action, every=every)

    def leave_unchanged(
        self,
        recipe: Recipe,
        *,
        model: Any = None,
        optimizers: Sequence[Any] = (),
        device: str = "cpu",
        undo: bool = True,
    ) -> Precision:
        """See `Surgeon.leave_unchanged`.

        The optimizer accumulates nothing, so the whole batch is one step's. Without a model, `undo`
        stops following models to come and puts the global policy back. Without `undo`, copies of
        the model that a tuning trains are models to come.
        """
        if not undo:
            return _left_alone(recipe, model, optimizers, _ASIDE_ATTRIBUTE, follow=True)
        if model is not None:
            for unit in layer_units(model):
                if unit.layer is model or not getattr(unit.layer, "compiled", False):
                    undo_former_recipe(unit.layer)
        return _left_alone(recipe, model, optimizers, RECIPE_ATTRIBUTE, follow=model is None)


def _left_alone(
    recipe: Recipe, model: Any, optimizers: Sequence[Any], attribute: str, *, follow: bool
) -> Precision:
    """Return a Precision that changes nothing: of a model, and with `follow` of those to come.

    Models hold in `attribute` what it knows of them. While one of them takes a step of its own, it
    is the latest: of several that take turns, each is stepped by its own optimizer.
    """

    def attach(precision: Precision, model: Any, given: Sequence[Any]) -> _UntouchedModel:
        left = _UntouchedModel(model, tuple(given))
        vars(model)[attribute] = left
        if "train_step" in own_steps(model):
            left.step = _OwnStep(model.train_step, lambda: precision.register(left, keep=False))
            vars(model)["train_step"] = left.step
        precision.register(left, keep=False)
        precision.count_from_here()
        return left

    precision = _of_whole_batch(recipe, model, attach)
    if model is not None:
        precision.attach(model, optimizers)
    else:
        precision._unattached += optimizers
    if follow:
        while _STOP_FOLLOWING:
            _STOP_FOLLOWING.pop()()
        stop = NewModels(precision.attach).stop
        _STOP_FOLLOWING.append(stop)
        precision._undo.append(stop)
    precision.count_from_here()
    return precision


class _OwnStep(Hook):
    """A `train_step` of a model's own, before which `begins` is called."""

    def __init__(self, original: Callable[..., Any], begins: Callable[[], None]) -> None:
        super().__init__(original)
        self.begins = begins

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begins()
        return self.original(*args, **kwargs)


def _of_whole_batch(recipe: Recipe, model: Any, attach: Callable[..., AppliedToModel]) -> Precision:
    """Return a Precision whose steps take the recipe's effective batch at once."""
    fitted, _ = fit_to_replicas(recipe, model)
    whole = fitted.batch_size * fitted.accumulation_steps
    return Precision(replace(fitted, batch_size=whole, accumulation_steps=1), attach)


@dataclass(eq=False)
class _UntouchedModel:
    """A model and optimizers that are left unchanged; see `AppliedToModel`."""

    model: Any
    given: tuple[Any, ...]
    nonfinite: Any = None
    step: Hook | None = None

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Return the script's own, as the model holds them by now, and its others."""
        held = {id(innermost_optimizer(each)): each for each in optimizers_of(self.model)}
        given = (held.pop(id(innermost_optimizer(each)), each) for each in self.given)
        return (*given, *held.values())

    @property
    def report(self) -> Applied:
        """Return an empty report: nothing was changed."""
        return Applied(Policy.FLOAT32)

    def restore(self) -> None:
        """Take off what looks at the model's own step."""
        if self.step is not None:
            remove_hook(self.model, "train_step", self.step)


def _apply_to_future_models(
    recipe: Recipe, facts: DeviceFacts | None, optimizers: Sequence[Any]
) -> Precision:
    """Set the global policy, and apply the recipe to each model as it comes."""
    while _STOP_FOLLOWING:
        _STOP_FOLLOWING.pop()()
    before = keras.config.dtype_policy()
    ours = policy_replacing(before, keras_name(recipe.policy))
    float32_policy = policy_replacing(before, "float32")
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    keras.config.set_dtype_policy(ours)

    def register_layer(layer: Any) -> None:
        """Note the layer; keep it float32 if it may be used in a dataset, before any model."""
        made.add(layer)
        if layer.dtype_policy is ours and is_preprocessing(layer):
            layer.dtype_policy = float32_policy

    def attach(precision: Precision, model: Any, given: Sequence[Any]) -> AppliedRecipe:
        _fit_to_replicas(precision, model)
        return AppliedRecipe(precision, model, facts, given=given, tolerant=True).apply()

    precision = Precision(recipe, attach_to=attach)
    _fit_to_replicas(precision, None)
    followed = (
        NewModels(precision.attach),
        NewObjects(keras.Layer, register_layer),
        UnreachedUpdates(precision, made),
    )

    def stop() -> None:
        for each in followed:
            each.stop()
        if keras.config.dtype_policy() is ours:
            keras.config.set_dtype_policy(before)

    _STOP_FOLLOWING.append(stop)
    precision._undo.append(stop)
    _apply_process_settings(precision)
    if precision.policy.mixed:
        trace_training_again()
    for optimizer in optimizers:
        precision.wrap(optimizer)
    return precision


def _fit_to_replicas(precision: Precision, model: Any) -> None:
    """Fit the precision's recipe to the replicas of `model`, and say what that changes."""
    precision.recipe, said = fit_to_replicas(precision.recipe, model)
    if said is not None:
        precision.notes.append(said)
        warnings.warn(said, AutoprecWarning, stacklevel=4)


def _apply_process_settings(precision: Precision) -> None:
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
                f"{threads} intra-op threads were requested after TensorFlow had started; "
                "apply the profile first thing in the script, or set TF_NUM_INTRAOP_THREADS="
                f"{threads}"
            )
    execution = tf.config.experimental
    if recipe.policy is Policy.TF32 and not execution.tensor_float_32_execution_enabled():
        execution.enable_tensor_float_32_execution(True)
        precision._undo.append(lambda: execution.enable_tensor_float_32_execution(False))
