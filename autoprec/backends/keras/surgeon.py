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

from autoprec.backends.keras.apply.applied_recipe import (
    RECIPE_ATTRIBUTE,
    AppliedRecipe,
    undo_former_recipe,
)
from autoprec.backends.keras.apply.change_report import ChangeReport
from autoprec.backends.keras.apply.earlier_traces import trace_training_again
from autoprec.backends.keras.apply.future_models import apply_to_future_models, attach_new_models
from autoprec.backends.keras.apply.layer_names import layer_units, own_steps
from autoprec.backends.keras.apply.method_hooks import Hook, remove_hook
from autoprec.backends.keras.apply.optimizer_attributes import optimizers_of
from autoprec.backends.keras.apply.optimizer_saving import innermost_optimizer
from autoprec.backends.keras.apply.precision import AppliedToModel, Precision
from autoprec.backends.keras.apply.replicas import fit_to_replicas, refuse_keras_distribution
from autoprec.backends.keras.apply.unreached_updates import UnreachedUpdates
from autoprec.backends.keras.watch.watch import Watch
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.watch_settings import Action

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
            precision = apply_to_future_models(recipe, facts)
            _apply_process_settings(precision)
            if precision.policy.mixed:
                trace_training_again()
            for optimizer in optimizers:
                precision.wrap(optimizer)
            return precision
        precision = Precision(recipe)
        precision.fit_to_replicas(model)
        operation = AppliedRecipe(precision, model, facts, given=optimizers)
        precision.register(operation, keep=True)
        try:
            _apply_process_settings(precision)
            operation.apply()
        except BaseException:
            precision.restore()
            raise
        precision.add_undo(UnreachedUpdates(precision).stop)
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
        precision.know(optimizers)
    if follow:
        attach_new_models(precision)
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
    def report(self) -> ChangeReport:
        """Return an empty report: nothing was changed."""
        return ChangeReport(Policy.FLOAT32)

    def restore(self) -> None:
        """Take off what looks at the model's own step."""
        if self.step is not None:
            remove_hook(self.model, "train_step", self.step)


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
        precision.add_undo(lambda: execution.enable_tensor_float_32_execution(False))
