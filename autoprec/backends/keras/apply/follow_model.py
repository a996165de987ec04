"""Hooks that let a recipe follow a model: into `compile`, into `build`, and into its first call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import keras
from keras.src.backend.common import global_state
from keras.src.trainers.trainer import Trainer

from autoprec.backends.keras.apply import saved_form
from autoprec.backends.keras.apply.hooks import Hook, NewObjects
from autoprec.backends.keras.apply.layer_names import Placed
from autoprec.backends.keras.apply.optimizers import exchanged


class Followed(Protocol):
    """What wants to know of a model's compile, builds and changes."""

    def compiling(self) -> None:
        """Prepare for the model being compiled."""

    def compiled(self) -> None:
        """React to the model having been compiled."""

    def built(self, unit: Placed) -> None:
        """React to a layer of the model having been built."""

    def changed(self) -> None:
        """React to layers that may have been added or removed."""


class Compiles(Hook):
    """A model's `compile`, the user's own included: what it sets is carried on with the recipe."""

    def __init__(self, original: Callable[..., Any], follower: Followed) -> None:
        super().__init__(original)
        self.follower = follower

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the model with the user's optimizers, also where wrapped ones are handed back."""
        self.follower.compiling()
        try:
            return self.original(
                *exchanged(args, saved_form.given_to),
                **exchanged(kwargs, saved_form.given_to),
            )
        finally:
            self.follower.compiled()


class Changes(Hook):
    """A Sequential's `add` or `pop`: the recipe is carried to the layers that are there then.

    A Sequential may outlive the models that it was a part of, and must not keep them.
    """

    def __init__(self, original: Callable[..., Any], follower: Followed) -> None:
        super().__init__(original)
        self.follower = weakref.ref(follower)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add or remove the layer."""
        result = self.original(*args, **kwargs)
        follower = self.follower()
        if follower is not None:
            follower.changed()
        return result


class Builds(Hook):
    """A layer's `build`: layers made inside are given the recipe's policies too."""

    def __init__(self, original: Callable[..., Any], follower: Followed, unit: Placed) -> None:
        super().__init__(original)
        self.follower = follower
        self.unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the layer."""
        result = self.original(*args, **kwargs)
        self.follower.built(self.unit)
        return result


class FirstCall(Hook):
    """A model's `call`, until it is called with data and not as a part of another model."""

    def __init__(self, original: Callable[..., Any], model: Any, called: Callable[[], None]):
        super().__init__(original)
        self.model = model
        self.called = called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Report the first call, then call the model as it is by then."""
        if _symbolic((args, kwargs)) or _outermost() not in (None, self.model):
            return self.original(*args, **kwargs)
        vars(self.model).pop("call")
        with _init_scope():
            self.called()
        return self.model.call(*args, **kwargs)


def stop_waiting(layer: Any) -> None:
    """Take off a model's `FirstCall`: a recipe is at work on it, or on what it is a part of."""
    if isinstance(vars(layer).get("call"), FirstCall):
        del vars(layer)["call"]


def _symbolic(values: Any) -> bool:
    return any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten(values))


def _outermost() -> Any:
    """Return the outermost layer that Keras is calling now; None outside every call."""
    context = global_state.get_global_attribute("current_call_ctx")
    return None if context is None else context.entry_layer


def _init_scope() -> AbstractContextManager[Any]:
    """Return a context in which variables can be made, even while TensorFlow traces."""
    if keras.config.backend() != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    return tf.init_scope()  # type: ignore[no-any-return]


class NewModels:
    """Watches models being made; `attach` is called once each is compiled or first called."""

    def __init__(self, attach: Callable[[Any], Any]) -> None:
        self.attach = attach
        self._watch = NewObjects(Trainer, self._made)

    @property
    def active(self) -> bool:
        """Say whether models are still watched."""
        return self._watch.active

    def _made(self, model: Any) -> None:
        if isinstance(model, keras.Model):
            _NewModel(self, model).wait()

    def stop(self) -> None:
        """Leave models alone from now on."""
        self._watch.stop()


class _NewModel:
    """A model that waits for its compile or its first call."""

    def __init__(self, watch: NewModels, model: Any) -> None:
        self.watch = watch
        self.model = model

    def wait(self) -> None:
        """Install hooks on `compile` and the first call, whichever comes first."""
        self.hooks = {
            "compile": Compiles(self.model.compile, self),
            "call": FirstCall(self.model.call, self.model, self.compiled),
        }
        vars(self.model).update(self.hooks)

    def compiling(self) -> None:
        """Do nothing: no recipe is applied yet."""

    def compiled(self) -> None:
        """Take the hooks off, and apply the recipe: the model is complete enough."""
        for name, hook in self.hooks.items():
            if vars(self.model).get(name) is hook:
                del vars(self.model)[name]
        if self.watch.active:
            self.watch.attach(self.model)

    def built(self, unit: Placed) -> None:
        """Do nothing: no recipe is applied yet."""

    def changed(self) -> None:
        """Do nothing: no recipe is applied yet."""
