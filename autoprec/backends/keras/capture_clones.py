"""Copies of a compiled model that is itself never trained.

A copy is made of the model's configuration. What that is known to leave out is given to the copy,
and nothing says what else it does: so the first copy takes a step with the model, at the same
weights, batch and random numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras.src.saving.serialization_lib import SafeModeScope

from autoprec.backends.keras.left_out import finish, give, left_out, own_objects
from autoprec.backends.keras.train.data import to_numpy, to_tensors
from autoprec.backends.keras.train.task_runner import (
    loss_and_gradients,
    make_variables,
    state_kept,
    state_variables,
    to_float,
)
from autoprec.errors import AutoprecError, TaskError

TASK_FILE = "write a task file, whose build_model() makes the model anew each time"

#: How far a copy's step may be from the model's, as a share, where the model repeats its own.
_TOLERANCE = 1e-4


class Clones:
    """Models with the architecture, weights and compilation of one that is never trained."""

    def __init__(self, name: str, model: Any, batch: Any) -> None:
        self._name, self._model, self._batch = name, model, batch
        self._weights = model.get_weights()
        self._compared = False

    def build(self) -> Any:
        """Return a compiled clone; the first one is compared with the model."""
        kind = type(self._model).__name__
        try:
            clone = self._cloned()
        except (AutoprecError, MemoryError):
            raise
        except Exception as error:
            raise TaskError(
                f"{self._name}: the {kind} cannot be cloned, and every trial trains a clone: "
                f"{type(error).__name__}: {error}. Give its class get_config() with the arguments "
                f"of __init__, or {TASK_FILE}"
            ) from error
        known, found = (len(each.trainable_variables) for each in (self._model, clone))
        if known != found:
            raise TaskError(
                f"{self._name}: a clone of the {kind} has {found} trainable weights, expected "
                f"{known}: get_config() leaves something out. Complete it, or {TASK_FILE}"
            )
        if not self._compared:
            self._compare(clone)
            self._compared = True
        return clone

    def _cloned(self) -> Any:
        model = self._model
        with _own_objects_known(model), _not_compiled(model), SafeModeScope(safe_mode=False):
            clone = keras.models.clone_model(model)
            if type(clone) is not type(model):  # Keras drops a class that makes its own graph
                _take_class(clone, model)
            give(left_out(model), clone)
        clone.compile(**compile_arguments(model))
        make_variables(clone, self._batch)
        clone.set_weights(self._weights)
        finish(clone)
        return clone

    def _compare(self, clone: Any) -> None:
        """Raise `TaskError` where a clone's step is another than the model's."""
        model, batch = self._model, to_tensors(self._batch)
        try:
            ours, again = _step(model, batch), _step(model, batch)
            with state_kept(clone):
                pairs = zip(state_variables(clone), state_variables(model), strict=False)
                for theirs, own in pairs:
                    if tuple(theirs.shape) == tuple(own.shape):
                        theirs.assign(own)
                found = _step(clone, batch)
        except Exception:  # the first step of a trial says it better
            return
        apart, noise = _apart(found, ours), _apart(again, ours)
        if not apart > 10 * noise + _TOLERANCE:
            return
        raise TaskError(
            f"{self._name}: a clone of the {type(model).__name__}, and every trial trains one, is "
            f"not what was given: at the same weights and batch its loss is {found[0]:.6g}, that "
            f"of the model {ours[0]:.6g}, and they differ by {apart:.2g} of their gradients. "
            "get_config() leaves something out, such as an attribute that was set after __init__. "
            f"Complete it, or {TASK_FILE}"
        )


def _take_class(clone: Any, model: Any) -> None:
    """Give a copy of a graph the model's class, whose steps are its own, and its attributes.

    Layers in them are the copy's own; what the graph does not hold, such as a teacher, is shared.
    """
    here, there = (each._flatten_layers(include_self=False) for each in (model, clone))
    copies = {id(layer): copy for layer, copy in zip(here, there, strict=True)}
    clone.__class__ = type(model)
    for name, value in vars(model).items():
        if name not in vars(clone):
            vars(clone)[name] = _with_copies(value, copies)


def _with_copies(value: Any, copies: Mapping[int, Any]) -> Any:
    """Return a value that holds the copies of layers in their places."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)([_with_copies(each, copies) for each in value])
    if isinstance(value, dict):
        return {key: _with_copies(each, copies) for key, each in value.items()}
    return copies.get(id(value), value)


def _step(model: Any, batch: Any) -> tuple[float, Any]:
    """Return the loss and the gradient, as one vector, of a step that changes nothing."""
    with state_kept(model):
        loss, gradients = loss_and_gradients(model, batch)
    model.reset_metrics()
    return to_float(loss), np.concatenate(
        [np.zeros(0), *(np.ravel(to_numpy(each)) for each in gradients)]
    )


def _apart(found: tuple[float, Any], ours: tuple[float, Any]) -> float:
    """Return how far two steps are apart, as a share of the larger of loss and gradient."""
    shares = []
    for one, other in zip(found, ours, strict=True):
        difference = np.linalg.norm(np.nan_to_num(np.ravel(one)) - np.nan_to_num(np.ravel(other)))
        size = np.linalg.norm(np.nan_to_num(np.ravel(other)))
        shares.append(float(difference / size) if size else float(bool(difference)))
    return max(shares)


def compile_arguments(model: Any) -> Mapping[str, Any]:
    """Return what a model was compiled with; what has a state is made anew."""
    given = dict(model._compile_config.config)
    optimizer = given["optimizer"]
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        held = model.optimizer
        optimizer = getattr(held, "inner_optimizer", held)
    given["optimizer"] = _new_optimizer(optimizer)
    for key in ("metrics", "weighted_metrics"):
        if given[key] is not None:
            given[key] = keras.tree.map_structure(_new_metric, given[key])
    return given


def _new_optimizer(optimizer: Any) -> Any:
    rate = getattr(optimizer, "_learning_rate", None)
    schedule = rate if callable(rate) and not isinstance(rate, keras.Variable) else None
    if schedule is not None:  # it has no state, and perhaps no configuration
        object.__setattr__(optimizer, "_learning_rate", 0.0)
    try:
        config = optimizer.get_config()
    finally:
        object.__setattr__(optimizer, "_learning_rate", rate)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        config["inner_optimizer"] = _new_optimizer(optimizer.inner_optimizer)
        return type(optimizer)(**config)
    if config.get("gradient_accumulation_steps"):
        config["gradient_accumulation_steps"] = None  # the batch of an update holds them
    if schedule is not None:
        config["learning_rate"] = schedule
    return type(optimizer).from_config(config)


def _new_metric(metric: Any) -> Any:
    """Make a metric anew; one whose configuration is not enough is shared."""
    if not isinstance(metric, keras.metrics.Metric):
        return metric
    try:
        return type(metric).from_config(metric.get_config())
    except Exception:
        return metric


@contextmanager
def _not_compiled(model: Any) -> Iterator[None]:
    """Let Keras clone a model without what it was compiled with, which it may not find again."""
    held = [each for each in model._flatten_layers() if vars(each).get("compiled")]
    for each in held:
        vars(each)["compiled"] = False
    try:
        yield
    finally:
        for each in held:
            vars(each)["compiled"] = True


@contextmanager
def _own_objects_known(model: Any) -> Iterator[None]:
    """Let Keras find the classes and functions that a model's layers are made of, by name."""
    with warnings.catch_warnings(), keras.utils.custom_object_scope(own_objects(model)):
        warnings.simplefilter("ignore")
        yield
