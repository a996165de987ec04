"""A model's first call with data, which shows that it is complete."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
from keras.src.backend.common import global_state

from autoprec.backends.keras.apply.method_hooks import Hook, remove_hook


class FirstCallHook(Hook):
    """A model's `call`, until it is called with data and not as a part of another model."""

    def __init__(self, original: Callable[..., Any], model: Any, called: Callable[[], None]):
        super().__init__(original)
        self.model = model
        self.called = called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Report the first call, then call the model as it is by then."""
        self._look_up()
        if _is_symbolic((args, kwargs)) or outermost_called_layer() not in (None, self.model):
            return self.original(*args, **kwargs)
        outermost = vars(self.model).get("call") is self
        self.remove()
        with _init_scope():
            self.called()
        following = self.model.call if outermost else self.original
        return following(*args, **kwargs)

    def remove(self) -> None:
        """Take the hook off the model, from below others as well."""
        self._look_up()
        remove_hook(self.model, "call", self)

    def _look_up(self) -> None:
        """Stand for the class's method of now: Keras makes a Functional of a new model's class."""
        if not isinstance(self.original, Hook):
            self.original = type(self.model).call.__get__(self.model)


def remove_first_call_hook(layer: Any) -> None:
    """Remove a model's `FirstCallHook`s: it, or a model it is part of, has a recipe now."""
    found = vars(layer).get("call")
    while isinstance(found, Hook):
        if isinstance(found, FirstCallHook):
            found.remove()
        found = found.original


def _is_symbolic(values: Any) -> bool:
    return any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten(values))


def outermost_called_layer() -> Any:
    """Return the outermost layer that Keras is calling now; None outside every call."""
    context = global_state.get_global_attribute("current_call_ctx")
    return None if context is None else context.entry_layer


def _init_scope() -> AbstractContextManager[Any]:
    """Return a context in which variables can be made, even while TensorFlow traces."""
    if keras.config.backend() != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    return tf.init_scope()  # type: ignore[no-any-return]
