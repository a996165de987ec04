"""Carries checkpoints between plain and loss-scaled optimizers, in .keras files and TensorFlow's.

Files that a model with a recipe saves are plain ones. Keras's own `LossScaleOptimizer` numbers an
optimizer's variables differently, and TensorFlow's checkpoints name them by attribute, so a wrapper
changes where the state lies. The state itself is the same; only the wrapper's few own numbers
(scale, growth counter, counts) come or go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from autoprec.backends.keras.apply.optimizer_saving import innermost_optimizer, wrapper_chain
from autoprec.core.recipe import LossScale
from autoprec.errors import UsageError


def convert_keras_file(
    source: str | Path, target: str | Path, *, scale: LossScale | None, **load: Any
) -> None:
    """Write a .keras file again, its optimizer in Keras's loss scale, or plain where it is None.

    Weights and the inner optimizer's state are kept bit for bit; so is the state of a loss scale
    that was already trained with. `load` goes to `keras.saving.load_model` (custom_objects, ...).
    """
    model = keras.saving.load_model(source, **load)
    if getattr(model, "optimizer", None) is None:
        raise UsageError(
            f"{source} holds a model that is not compiled, so it has no optimizer to convert; "
            "such a file loads anywhere as it is"
        )
    given = model.optimizer
    scaled = isinstance(given, keras.optimizers.LossScaleOptimizer)
    wanted = given
    if scale is None:
        wanted = innermost_optimizer(given)
    elif not scaled:
        wanted = keras.optimizers.LossScaleOptimizer(given, scale.initial, scale.growth_interval)
        wanted.build(model.trainable_variables)
    model.optimizer = model._compile_config.config["optimizer"] = wanted
    model.save(target)


def restore_checkpoint(path: str, **objects: Any) -> Any:
    """Restore a tf.train.Checkpoint, whether its optimizers were saved with wrappers or without.

    `objects` are the keyword arguments `tf.train.Checkpoint` was given when it was saved (`model=`,
    `optimizer=`, ...), as they are now. Returns TensorFlow's load status. A wrapper's own numbers
    stay as they are where the checkpoint holds none. `path` is a checkpoint's prefix, as
    `tf.train.latest_checkpoint` returns it. Optimizers must be built.
    """
    import tensorflow as tf

    saved = [name for name, _ in tf.train.list_variables(path)]
    views: dict[str, Any] = {}
    with _models_with(saved, objects, views):
        return tf.train.Checkpoint(**views).restore(path)


@contextmanager
def _models_with(
    saved: list[str], objects: dict[str, Any], views: dict[str, Any]
) -> Iterator[None]:
    """Fill `views` with the objects in the form they were saved in, while the block runs."""
    changed = []
    for name, thing in objects.items():
        views[name] = _view(thing, saved, name) if _is_optimizer(thing) else thing
        own = getattr(thing, "optimizer", None)
        if isinstance(thing, keras.Model) and _is_optimizer(own):
            changed.append((thing, own))
            thing.optimizer = _view(own, saved, f"{name}/optimizer")
    try:
        yield
    finally:
        for model, optimizer in changed:
            model.optimizer = optimizer


def _is_optimizer(thing: Any) -> bool:
    return isinstance(thing, keras.optimizers.Optimizer)


def _view(optimizer: Any, saved: list[str], prefix: str) -> Any:
    """Return the optimizer wrapped as often as it was in the checkpoint that `saved` lists."""
    import tensorflow as tf

    depth_saved = _depth(saved, prefix)
    wrapped = list(wrapper_chain(optimizer))
    while len(wrapped) - 1 > depth_saved:
        wrapped.pop(0)
    view = wrapped[0]
    for _ in range(depth_saved - (len(wrapped) - 1)):
        shell = tf.Module()
        shell.inner_optimizer = view
        view = shell
    return view


def _depth(saved: list[str], prefix: str) -> int:
    """Count the wrappers that an optimizer was saved with."""
    depth = 0
    below = f"{prefix}/inner_optimizer/"
    while any(name.startswith(below) for name in saved):
        depth += 1
        below += "inner_optimizer/"
    return depth
