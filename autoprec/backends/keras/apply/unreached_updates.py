"""Warns where a profile was applied and the training goes past it.

A model made before the policy was set stays float32 for ever, and an optimizer that is not the
wrapped one neither scales nor accumulates; both train, and nothing else would say so. The first
updates after a recipe was applied are looked at, from Python: none of it is in a compiled step.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any, ClassVar

import keras

from autoprec.backends.keras.apply.applied_recipe import RECIPE_ATTRIBUTE
from autoprec.backends.keras.apply.optimizer_saving import in_wrapper
from autoprec.backends.keras.apply.precision import Precision
from autoprec.errors import AutoprecWarning

#: How many updates are looked at.
_LOOKS = 3


class UnreachedUpdates:
    """Looks at the first updates after a recipe was applied, whoever's optimizer makes them.

    With `made`, the layers made since the policy was set, others are none of the recipe's.
    """

    _active: ClassVar[list[UnreachedUpdates]] = []
    _noted: ClassVar[weakref.WeakValueDictionary[int, Precision]] = weakref.WeakValueDictionary()

    def __init__(self, precision: Precision, made: weakref.WeakSet[Any] | None = None) -> None:
        self._precision = weakref.ref(precision)
        self._made = made
        self._left = _LOOKS
        self._noted[id(precision)] = precision
        if not self._active:
            _install()
        self._active.append(self)

    def stop(self) -> None:
        """Look no more."""
        if self in self._active:
            self._active.remove(self)
            if not self._active:
                _uninstall()

    def look(self, optimizer: Any, variables: Any, wrapped: bool) -> None:
        """Warn, once, if this update of `variables` goes past the recipe."""
        precision = self._precision()
        self._left -= 1
        said = None if precision is None else self._problem(precision, optimizer, variables)
        if said is not None and not wrapped:
            warnings.warn(said, AutoprecWarning, stacklevel=4)
        if precision is None or not self._left or (said is not None and not wrapped):
            self.stop()

    def _problem(self, precision: Precision, optimizer: Any, variables: Any) -> str | None:
        updated = {id(variable) for variable in variables}
        if updated & _trained_under(precision):
            return _past_the_wrapper(precision, optimizer)
        if self._made is None or not precision.policy.mixed:
            return None
        if updated & {id(v) for layer in self._made for v in layer._trainable_variables}:
            return None
        if any(updated & _trained_under(other) for other in list(self._noted.values())):
            return None  # a recipe of its own was applied to that model
        return (
            f"{optimizer.name} trains weights in float32 that the profile does not reach: their "
            "layers were made before apply_profile was called. Call it before the model is made, "
            "or give it the model: apply_profile(profile, model=model)"
        )


def _trained_under(precision: Precision) -> set[int]:
    """Return the weights, by id, of the models that have this recipe and no other since."""
    applied = [
        each for each in precision.registered() if vars(each.model).get(RECIPE_ATTRIBUTE) is each
    ]
    return {id(variable) for each in applied for variable in each.model.trainable_variables}


def _past_the_wrapper(precision: Precision, optimizer: Any) -> str | None:
    """Say what an update by the user's own optimizer leaves out; None where that is nothing."""
    left_out = []
    if precision.loss_scale is not None:
        left_out.append("the loss is not scaled, and a step that overflows is not skipped")
    if precision.recipe.accumulation_steps > 1:
        left_out.append("nothing is accumulated")
    if not left_out:
        return None
    return (
        f"{optimizer.name} is called past the profile: {'; '.join(left_out)}. Use the optimizer "
        "that the profile has wrapped: optimizer = precision.wrap(optimizer) before the loop, then "
        "loss = optimizer.scale_loss(loss) inside the tape, and "
        "optimizer.apply_gradients(zip(gradients, model.trainable_variables))"
    )


def _install() -> None:
    kind = keras.optimizers.Optimizer
    original = kind.apply

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        known = trainable_variables or self._trainable_variables
        for each in list(UnreachedUpdates._active):
            each.look(self, known, in_wrapper())
        return original(self, grads, trainable_variables)

    kind.apply = apply


def _uninstall() -> None:
    del keras.optimizers.Optimizer.apply  # what it inherits shows again
