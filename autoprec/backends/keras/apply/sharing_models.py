"""Makes float32 what other models give a script that share layers with one under a recipe.

An autoencoder and its encoder are two models of the same layers, and what a network computes in
between is read by a model of its inner outputs. A recipe is applied to one of them; in the others'
calls the same layers compute in 16 bits, and would end in them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer

from autoprec.backends.keras.apply.first_call_hook import FirstCallHook
from autoprec.backends.keras.apply.float32_outputs import ModelOutputs
from autoprec.backends.keras.apply.method_hooks import Hook, NewObjects, remove_hook
from autoprec.backends.keras.apply.raising_layers import HasUnits


class SharingModels:
    """The models that share layers with one under a recipe, made before and after it was applied.

    None is kept: a script may make one for every batch.
    """

    def __init__(self, applied: HasUnits) -> None:
        self._applied = weakref.ref(applied)
        self._hooks: weakref.WeakKeyDictionary[Any, weakref.ref[Hook]] = weakref.WeakKeyDictionary()

    def follow(self, models: Iterable[Any], *, new: bool) -> None:
        """Install hooks on those of `models` that share layers, and with `new` on those to come."""
        for model in models:
            self.take(model)
        if new:
            _SHARING.tell(self)

    def take(self, model: Any) -> None:
        """Make what `model` gives a script float32, if it shares layers."""
        applied = self._applied()
        if applied is None or model in self._hooks or not vars(model).get("_layers"):
            return
        ours = {
            id(unit.layer)
            for unit in applied.units
            if not isinstance(unit.layer, keras.layers.InputLayer)
        }
        inside = model._flatten_layers(include_self=False)
        if id(model) not in ours and any(id(each) in ours for each in inside):
            hook = ModelOutputs(model, model.call)
            self._hooks[model] = weakref.ref(hook)
            vars(model)["call"] = hook

    def restore(self) -> None:
        """Take the hooks off, and look at new models no more."""
        _SHARING.told.discard(self)
        for model, reference in list(self._hooks.items()):
            hook = reference()
            if hook is not None:
                remove_hook(model, "call", hook)
        self._hooks.clear()


class _SharingModels:
    """Tells every `SharingModels` of each new model; there is one of these in a process."""

    def __init__(self) -> None:
        self.told: weakref.WeakSet[SharingModels] = weakref.WeakSet()
        self._started = False

    def tell(self, sharing: SharingModels) -> None:
        """Tell `sharing` of new models, too."""
        self.told.add(sharing)
        if not self._started:
            self._started = True
            NewObjects(Trainer, self._made)

    def _made(self, model: Any) -> None:
        """Wait for the model's first call: it has no layers yet."""
        if self.told and isinstance(model, keras.Model):
            called = functools.partial(self._called, model)
            vars(model)["call"] = FirstCallHook(model.call, model, called)

    def _called(self, model: Any) -> None:
        for each in list(self.told):
            each.take(model)


_SHARING = _SharingModels()
