"""Hooks that let a recipe follow a model: into `compile`, into `build`, and into its first call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import keras
from keras.src.backend.common import global_state
from keras.src.trainers.trainer import Trainer

from autoprec.backends.keras.apply import optimizer_saving
from autoprec.backends.keras.apply.layer_names import LayerUnit
from autoprec.backends.keras.apply.method_hooks import Hook, NewObjects
from autoprec.backends.keras.apply.optimizer_attributes import replace_optimizers


class ModelFollower(Protocol):
    """What wants to know of a model's compile, builds and changes."""

    def before_compile(self) -> None:
        """Prepare for the model being compiled."""

    def after_compile(self) -> None:
        """React to the model having been compiled."""

    def built(self, unit: LayerUnit) -> None:
        """React to a layer of the model having been built."""

    def changed(self) -> None:
        """React to layers that may have been added or removed."""


class CompileHook(Hook):
    """A model's `compile`, the user's own included: what it sets is carried on with the recipe."""

    def __init__(self, original: Callable[..., Any], follower: ModelFollower) -> None:
        super().__init__(original)
        self.follower = follower

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the model with the user's optimizers, also where wrapped ones are handed back."""
        self.follower.before_compile()
        try:
            return self.original(
                *replace_optimizers(args, optimizer_saving.optimizer_as_given),
                **replace_optimizers(kwargs, optimizer_saving.optimizer_as_given),
            )
        finally:
            self.follower.after_compile()


class LayerChangeHook(Hook):
    """A Sequential's `add` or `pop`: the recipe is carried to the layers that are there then.

    A Sequential may outlive the models that it was a part of, and must not keep them.
    """

    def __init__(self, original: Callable[..., Any], follower: ModelFollower) -> None:
        super().__init__(original)
        self.follower = weakref.ref(follower)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add or remove the layer."""
        result = self.original(*args, **kwargs)
        follower = self.follower()
        if follower is not None:
            follower.changed()
        return result


class BuildHook(Hook):
    """A layer's `build`: layers made inside are given the recipe's policies too."""

    def __init__(
        self, original: Callable[..., Any], follower: ModelFollower, unit: LayerUnit
    ) -> None:
        super().__init__(original)
        self.follower = follower
        self.unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the layer."""
        result = self.original(*args, **kwargs)
        self.follower.built(self.unit)
        return result


class FirstCallHook(Hook):
    """A model's `call`, until it is called with data and not as a part of another model."""

    def __init__(self, original: Callable[..., Any], model: Any, called: Callable[[], None]):
        super().__init__(original)
        self.model = model
        self.called = called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Report the first call, then call the model as it is by then."""
        if _is_symbolic((args, kwargs)) or outermost_called_layer() not in (None, self.model):
            return self.original(*args, **kwargs)
        vars(self.model).pop("call")
        with _init_scope():
            self.called()
        return self.model.call(*args, **kwargs)


def remove_first_call_hook(layer: Any) -> None:
    """Remove a model's `FirstCallHook`: it, or a model it is part of, has a recipe now."""
    if isinstance(vars(layer).get("call"), FirstCallHook):
        del vars(layer)["call"]


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


class NewModels(NewObjects):
    """Notices models being made; `attach` is called once each is compiled or first called."""

    def __init__(self, attach: Callable[[Any], Any]) -> None:
        self.attach = attach
        super().__init__(Trainer, self._made)

    def _made(self, model: Any) -> None:
        if isinstance(model, keras.Model):
            _WaitingModel(self, model).wait()


class _WaitingModel:
    """A model that waits for its compile or its first call."""

    def __init__(self, noticed_by: NewModels, model: Any) -> None:
        self.noticed_by = noticed_by
        self.model = model

    def wait(self) -> None:
        """Install hooks on `compile` and the first call, whichever comes first."""
        self.hooks = {
            "compile": CompileHook(self.model.compile, self),
            "call": FirstCallHook(self.model.call, self.model, self.after_compile),
        }
        vars(self.model).update(self.hooks)

    def before_compile(self) -> None:
        """Do nothing: no recipe is applied yet."""

    def after_compile(self) -> None:
        """Take the hooks off, and apply the recipe: the model is complete enough."""
        for name, hook in self.hooks.items():
            if vars(self.model).get(name) is hook:
                del vars(self.model)[name]
        if self.noticed_by.active:
            self.noticed_by.attach(self.model)

    def built(self, unit: LayerUnit) -> None:
        """Do nothing: no recipe is applied yet."""

    def changed(self) -> None:
        """Do nothing: no recipe is applied yet."""
