"""Says which layer cannot compute in a profile's 16 bits, where a model raises because of them.

A model's own code may put together what nothing casts, as a float32 constant and a layer's 16-bit
output, or call what has no 16-bit kernel. A tuning looks for the layers that must stay in float32;
under a recipe that was not tuned for the model TensorFlow's error ends the training. It stays the
same exception, and its message begins with the layer and what helps.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from autoprec.backends.keras.apply.layer_names import LayerUnit, own_steps
from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.backends.shared.raising_modules import modules_raised_in, note_modules
from autoprec.core.dtypes import Policy
from autoprec.errors import first_line

#: How messages of the libraries below Keras name the 16-bit dtypes.
_SIXTEEN_BITS = re.compile(r"\b(DT_)?(b?float16|half)\b", re.IGNORECASE)

#: Stands in every message that is explained already.
_ADVICE = "float32_modules: ["


class HasUnits(Protocol):
    """A recipe applied to a model of these layers."""

    @property
    def units(self) -> Sequence[LayerUnit]:
        """Return the model's layers."""


def explain_errors(
    applied: HasUnits, units: Sequence[LayerUnit], policy: Policy, hooks: InstalledHooks
) -> None:
    """Explain from now on what models raise in their calls, and the first one in steps of its own.

    A model inside may outlive the one it is a part of, and must not keep it.
    """
    reference = weakref.ref(applied)
    for unit in units:
        if isinstance(unit.layer, keras.Model):
            hook = _ExplainingHook(unit.layer.call, reference, policy)
            hooks.install(unit.layer, "call", hook)
    model = units[0].layer
    for name in own_steps(model):
        hooks.install(model, name, _ExplainingHook(getattr(model, name), reference, policy))


class _ExplainingHook(Hook):
    """A method of a model, whose exceptions are explained and raised on."""

    def __init__(
        self, original: Callable[..., Any], applied: weakref.ref[HasUnits], policy: Policy
    ) -> None:
        super().__init__(original)
        self.applied, self.policy = applied, policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.original(*args, **kwargs)
        except Exception as error:
            applied = self.applied()
            if applied is not None:
                _explain(error, applied.units, self.policy)
            raise


def _explain(error: Exception, units: Sequence[LayerUnit], policy: Policy) -> None:
    """Begin the message of an error about 16-bit dtypes with the innermost layer it is of."""
    text = str(error)
    if not _SIXTEEN_BITS.search(text) or _ADVICE in text:
        return
    note_modules(error, {id(each): unit.path for unit in units for each in unit.members})
    path = next(iter(modules_raised_in(error)), "")
    (unit,) = [each for each in units if each.path == path]
    where = f"{path or unit.layer.name} ({unit.kind})"
    _set_message(
        error,
        f"{where} does not compute in {policy}: {first_line(error).rstrip('.')}. Keep its own code "
        f"in float32 by {_ADVICE}{path!r}] in the recipe, which `autoprec tune` looks for, or cast "
        f"there what meets: keras.ops.cast(x, 'float32')\n\n{text}",
    )


def _set_message(error: Exception, message: str) -> None:
    if hasattr(error, "_message"):  # TensorFlow's own errors
        error._message = message
    elif error.args and isinstance(error.args[0], str):
        error.args = (message, *error.args[1:])
    else:
        error.add_note(message)
