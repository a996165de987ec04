"""A model under one recipe as a trace needs it: built, its state taken and put back, stepped.

State is weights, statistics and the seeds of dropout, so that two models in the same state see the
same random numbers. Snapshots are numpy arrays in the order of the model's variables, which is the
same in every build.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from autoprec.backends.keras.apply import optimizer_wrapping
from autoprec.backends.keras.apply.loss_scale import ScaledOptimizer
from autoprec.backends.keras.apply.surgeon import KerasSurgeon
from autoprec.backends.keras.train.data import size_in_bytes
from autoprec.backends.keras.train.rng import same_in_every_dtype
from autoprec.backends.keras.train.task_runner import (
    VariableMemory,
    build_model,
    gradient_function,
    loss_in_logs,
    on_tensorflow,
    state_variables,
    to_float,
)
from autoprec.backends.protocol import Task
from autoprec.core.recipe import Recipe

#: Relative noise of the null: bfloat16's unit roundoff, 2**-8, halved.
NOISE = 2.0**-9

Snapshot = Sequence[Any]


class Trainee:
    """One model with its optimizer under one recipe."""

    def __init__(self, task: Task, recipe: Recipe, seed: int, batch: Any, device: str) -> None:
        knobs = {k: v for k, v in recipe.knobs.items() if k != "steps_per_execution"}
        self.model: Any = build_model(task, seed, batch)
        self.model.steps_per_execution = 1
        self.precision: Any = KerasSurgeon().apply(
            replace(recipe, knobs=knobs), model=self.model, device=device
        )
        self.model.make_train_function()
        self._run: Any = None

    def step(self, micro_batches: Sequence[Any]) -> float | None:
        """Train one update; return the mean loss before it, None if it is not finite."""
        losses = []
        for batch in micro_batches:
            self.model.reset_metrics()
            feed = iter([batch]) if on_tensorflow() else [batch]
            with same_in_every_dtype():
                losses.append(to_float(loss_in_logs(self.model.train_function(feed))))
        return finite(sum(losses) / len(losses))

    def loss_and_gradient(self, batch: Any) -> tuple[float | None, list[Any]]:
        """Return the loss and the float32 gradient of one batch; the state stays as it is."""
        if self._run is None:
            self._run = gradient_function(self.model)
        kept = self.take()
        self.model.reset_metrics()
        scale = self.precision.scale
        with same_in_every_dtype():
            loss, gradients = self._run(batch, scale)
        self.put_back(kept)
        return finite(to_float(loss)), [to_numpy(g) / np.float32(scale) for g in gradients]

    def take(self) -> Snapshot:
        """Copy the state."""
        return [to_numpy(v) for v in state_variables(self.model)]

    def put_back(self, snapshot: Snapshot) -> None:
        """Put a copied state back."""
        for variable, value in zip(state_variables(self.model), snapshot, strict=True):
            variable.assign(value)

    def size_in_bytes(self) -> int:
        """Return the size of a copy of the state in bytes."""
        return sum(size_in_bytes(variable) for variable in state_variables(self.model))

    def add_noise(self, seed: int) -> None:
        """Multiply every weight by 1 + uniform(-2**-9, 2**-9)."""
        random = np.random.default_rng(seed)
        for variable in self.model.trainable_variables:
            value = to_numpy(variable)
            factor = 1.0 + random.uniform(-NOISE, NOISE, value.shape)
            variable.assign((value * factor).astype(value.dtype))

    @property
    def scaled(self) -> Any:
        """Return the loss-scaling optimizer, or None."""
        return optimizer_wrapping.find_wrapper(self.model.optimizer, ScaledOptimizer)

    def close(self) -> None:
        """Restore the process's settings, and free the memory."""
        memory = VariableMemory(self.model)
        self.precision.restore()
        self.model = self.precision = self._run = None
        gc.collect()
        memory.free()


def to_numpy(value: Any) -> Any:
    """Return a tensor or variable as a NumPy array."""
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))


def finite(value: float) -> float | None:
    """Return the value, or None if it is infinite or NaN."""
    return value if math.isfinite(value) else None


def gradient_error(candidate: Sequence[Any], reference: Sequence[Any]) -> float | None:
    """Return ||g - g32|| / ||g32|| over all weights, None where it is not finite."""
    difference = total = 0.0
    for ours, theirs in zip(candidate, reference, strict=True):
        difference += float(np.sum(np.square((ours - theirs).astype(np.float64))))
        total += float(np.sum(np.square(theirs.astype(np.float64))))
    if not math.isfinite(difference):
        return None
    if difference == 0.0:
        return 0.0
    return math.sqrt(difference / total) if total > 0.0 else None
