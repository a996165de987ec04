"""A task of a compiled Keras model and what its `fit` is given.

Every model that is built is a clone with the same weights, frozen layers, and arguments of
`compile`; its optimizer and its metrics are made anew of their own configurations. The model itself
is never trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.saving.serialization_lib import SafeModeScope

from autoprec.backends.keras.apply.optimizer_attributes import optimizers_of
from autoprec.backends.keras.capture_data import batches_of
from autoprec.backends.keras.train.data import iterate
from autoprec.backends.keras.train.task_runner import make_variables
from autoprec.backends.protocol import Task
from autoprec.errors import AutoprecError, TaskError, UsageError

_TASK_FILE = "write a task file, whose build_model() makes the model anew each time"


def from_keras(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    *,
    name: str,
) -> Task:
    """Make a task of what `model.fit(x, y, sample_weight=..., batch_size=...)` would train.

    Raises `UsageError` for what cannot be tuned as it is, `TaskError` for a model that cannot be
    cloned; both say the way out.
    """
    _refuse(name, model)
    data = batches_of(x, y, sample_weight, batch_size, name)
    steps = getattr(model.optimizer, "gradient_accumulation_steps", None) or 1
    task = Task(
        name=name,
        build_model=lambda: None,
        build_data=data.build,
        batch_size=None if data.own is None else data.own * (1 if data.fixed else steps),
        fixed_batch=data.fixed,
    )
    batch = next(iterate(task, data.build(data.own or 1), data.own or 1))
    if not model.built or not model.weights:
        make_variables(model, batch)
    return Task(**{**vars(task), "build_model": _Clones(name, model, batch).build})


def _refuse(name: str, model: Any) -> None:
    def refuse(what: str, instead: str) -> None:
        raise UsageError(f"{name}: {what}. {instead[0].upper()}{instead[1:]}")

    kind = type(model).__name__
    if not isinstance(model, keras.Model):
        refuse(f"the model is a {kind}, expected a compiled keras.Model", "give that")
    if not getattr(model, "compiled", False):
        refuse(f"the {kind} is not compiled", "call model.compile(optimizer=..., loss=...) first")
    if type(model).compile is not keras.Model.compile or len(optimizers_of(model)) != 1:
        refuse(
            f"the {kind} has several optimizers or a compile() of its own, as GANs do, and a clone "
            "of it cannot be compiled by what compile() was given",
            f"{_TASK_FILE} and compiles it",
        )


class _Clones:
    """Models with the architecture, weights and compilation of one that is never trained."""

    def __init__(self, name: str, model: Any, batch: Any) -> None:
        self._name, self._model, self._batch = name, model, batch
        self._weights = model.get_weights()

    def build(self) -> Any:
        """Return a compiled clone."""
        kind = type(self._model).__name__
        try:
            with _classes_known(self._model), SafeModeScope(safe_mode=False):
                clone = keras.models.clone_model(self._model)
                self._freeze(clone)
                clone.compile(**self._arguments())
            make_variables(clone, self._batch)
            clone.set_weights(self._weights)
        except (AutoprecError, MemoryError):
            raise
        except Exception as error:
            raise TaskError(
                f"{self._name}: the {kind} cannot be cloned, and every trial trains a clone: "
                f"{type(error).__name__}: {error}. Give its class get_config() with the arguments "
                f"of __init__, or {_TASK_FILE}"
            ) from error
        known, found = (len(each.trainable_variables) for each in (self._model, clone))
        if known != found:
            raise TaskError(
                f"{self._name}: a clone of the {kind} has {found} trainable weights, expected "
                f"{known}: get_config() leaves something out. Complete it, or {_TASK_FILE}"
            )
        return clone

    def _freeze(self, clone: Any) -> None:
        """Freeze the layers that are frozen, where the clone has the same already."""
        here, there = (list(each._flatten_layers()) for each in (self._model, clone))
        if len(here) == len(there):
            for layer, cloned in zip(here, there, strict=True):
                cloned.trainable = layer.trainable

    def _arguments(self) -> Mapping[str, Any]:
        """Return the arguments of `compile`, with what has a state made anew."""
        given = dict(self._model._compile_config.config)
        optimizer = given["optimizer"]
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            held = self._model.optimizer
            optimizer = getattr(held, "inner_optimizer", held)
        config = optimizer.get_config()
        if config.get("gradient_accumulation_steps"):
            config["gradient_accumulation_steps"] = None  # the batch of an update holds them
        given["optimizer"] = type(optimizer).from_config(config)
        for key in ("metrics", "weighted_metrics"):
            if given[key] is not None:
                given[key] = keras.tree.map_structure(_anew, given[key])
        return given


def _anew(metric: Any) -> Any:
    if isinstance(metric, keras.metrics.Metric):
        return type(metric).from_config(metric.get_config())
    return metric


@contextmanager
def _classes_known(model: Any) -> Iterator[None]:
    """Let Keras find the classes of a model's own layers, wherever they were defined."""
    own = {type(each) for each in model._flatten_layers()}
    own = {each for each in own if not each.__module__.startswith("keras.")}
    with (
        warnings.catch_warnings(),
        keras.utils.custom_object_scope({each.__name__: each for each in own}),
    ):
        warnings.simplefilter("ignore")
        yield
