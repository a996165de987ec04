"""Whether a model's training step is really compiled by XLA.

Keras switches it off for some layers (random rotations, string lookups, a GPU's own LSTM), with
deterministic operations and on some platforms, with no more than a warning; what is timed then is
not what the recipe says.
"""

from __future__ import annotations

import warnings
from typing import Any

from autoprec.backends.keras.apply.replicas import replica_count
from autoprec.backends.keras.devices import on_tensorflow
from autoprec.core.recipe import Recipe


class NotCompiled(RuntimeError):
    """A recipe says that the step is compiled, and it is not."""


def compile_obstacle(model: Any) -> str:
    """Say why Keras would not compile this model's step; empty where it would.

    Keras itself is asked, by switching compilation on for a moment.
    """
    eager = _runs_eagerly(model)
    if eager:
        return eager
    if replica_count(model) > 1:
        return _reason(model)
    before = model.jit_compile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.jit_compile = True
        taken = bool(model.jit_compile)
        model.jit_compile = before
    return "" if taken else _reason(model)


def check_compiled(model: Any, recipe: Recipe) -> None:
    """Raise `NotCompiled` where a model that has trained by a compiled recipe ran otherwise."""
    if recipe.compile:
        why = _runs_eagerly(model) or ("" if model.jit_compile else _reason(model))
        if why:
            raise NotCompiled(why)


def _runs_eagerly(model: Any) -> str:
    if model.run_eagerly:
        return "the model is compiled with run_eagerly=True"
    if on_tensorflow():
        import tensorflow as tf

        if tf.config.functions_run_eagerly():
            return "tf.config.run_functions_eagerly(True) is set"
    return ""


def _reason(model: Any) -> str:
    if replica_count(model) > 1:
        return "TensorFlow cannot compile a step of several replicas with XLA"
    layers = [layer for layer in model._flatten_layers() if not layer.supports_jit]
    if not layers:
        return (
            "Keras compiles no model here: operations are deterministic "
            "(enable_op_determinism), or XLA has no such device"
        )
    names = ", ".join(f"{layer.name} ({type(layer).__name__})" for layer in layers[:3])
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return (
        f"Keras does not compile a model with {names}{more}; layers that only prepare the inputs "
        "may go into the data pipeline"
    )
