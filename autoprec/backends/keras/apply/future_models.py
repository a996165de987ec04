"""Applies a recipe to models to come: each is changed in place once it is compiled or called.

Without a model the global policy is set, and there is but one: what followed new models before
stops.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer

from autoprec.backends.keras.apply.applied_recipe import AppliedRecipe, CompileHook
from autoprec.backends.keras.apply.dtype_policies import keras_name
from autoprec.backends.keras.apply.first_call_hook import FirstCallHook
from autoprec.backends.keras.apply.layer_policy_stack import policy_replacing
from autoprec.backends.keras.apply.method_hooks import NewObjects, remove_hook
from autoprec.backends.keras.apply.precision import Precision
from autoprec.backends.keras.apply.preprocessing_layers import is_preprocessing
from autoprec.backends.keras.apply.unreached_updates import UnreachedUpdates
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.recipe import Recipe

#: Stops following new models, if they are followed.
_STOP_FOLLOWING: list[Callable[[], None]] = []


def apply_to_future_models(recipe: Recipe, facts: DeviceFacts | None) -> Precision:
    """Set the global policy, and apply the recipe to each model as it comes."""
    _stop_following()
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
        precision.fit_to_replicas(model)
        return AppliedRecipe(precision, model, facts, given=given, tolerant=True).apply()

    precision = Precision(recipe, attach)
    precision.fit_to_replicas(None)
    attach_new_models(precision)
    followed = NewObjects(keras.Layer, register_layer), UnreachedUpdates(precision, made)

    def stop() -> None:
        for each in followed:
            each.stop()
        if keras.config.dtype_policy() is ours:
            keras.config.set_dtype_policy(before)

    _stop_with(precision, stop)
    return precision


def attach_new_models(precision: Precision) -> None:
    """Attach each model that is made from now on, instead of to what followed them before."""
    _stop_following()
    _stop_with(precision, _NewModels(precision.attach).stop)


def _stop_with(precision: Precision, stop: Callable[[], None]) -> None:
    """Call `stop` when the precision ends, or when another follows new models."""
    _STOP_FOLLOWING.append(stop)
    precision.add_undo(stop)


def _stop_following() -> None:
    while _STOP_FOLLOWING:
        _STOP_FOLLOWING.pop()()


class _NewModels(NewObjects):
    """Notices models being made; `attach` is called once each is compiled or first called."""

    def __init__(self, attach: Callable[[Any], Any]) -> None:
        self.attach = attach
        super().__init__(Trainer, self._made)

    def _made(self, model: Any) -> None:
        if isinstance(model, keras.Model):
            _WaitingModel(self, model).wait()


class _WaitingModel:
    """A model that waits for its compile or its first call."""

    def __init__(self, noticed_by: _NewModels, model: Any) -> None:
        self.noticed_by = noticed_by
        self.model = model

    def wait(self) -> None:
        """Install hooks on `compile` and the first call, whichever comes first."""
        self.compiled = CompileHook(self.model.compile, self.complete)
        self.called = FirstCallHook(self.model.call, self.model, self.complete)
        vars(self.model).update(compile=self.compiled, call=self.called)

    def complete(self) -> None:
        """Take the hooks off, and apply the recipe: the model is complete enough."""
        remove_hook(self.model, "compile", self.compiled)
        self.called.remove()
        if self.noticed_by.active:
            self.noticed_by.attach(self.model)
