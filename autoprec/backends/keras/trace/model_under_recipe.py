"""A model under one recipe as a trace needs it: built, its state taken and put back, stepped.

State is weights, statistics and the seeds of dropout, so that two models in the same state see the
same random numbers. Snapshots are NumPy arrays in the order of the model's variables, which is the
same in every build.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from autoprec.backends.keras.apply.layer_names import layer_units
from autoprec.backends.keras.apply.replicas import for_whole_batches
from autoprec.backends.keras.apply.untracked_state import untracked_variables
from autoprec.backends.keras.devices import on_tensorflow
from autoprec.backends.keras.dtypes import is_low
from autoprec.backends.keras.measure.batch_splitting import without_dropout
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.backends.keras.trace import magnitudes
from autoprec.backends.keras.train.batch_dimension import count_samples
from autoprec.backends.keras.train.data import size_in_bytes, to_numpy
from autoprec.backends.keras.train.recorded_outputs import (
    Evaluation,
    Outputs,
    observing_function,
)
from autoprec.backends.keras.train.rng import (
    DrawsFromState,
    KerasGenerators,
    same_in_every_dtype,
)
from autoprec.backends.keras.train.task_runner import (
    VariableMemory,
    build_model,
    gradient_function,
    loss_in_logs,
    raising_layers_noted,
    state_variables,
    to_float,
)
from autoprec.backends.protocol import Task
from autoprec.backends.shared.buffer_updates import MOST_VALUES
from autoprec.backends.shared.gradient_exponents import relative_error
from autoprec.backends.shared.trace_framework import (
    EXACT_NOISE,
    NOISE,
    TF32_NOISE,
    Evaluated,
    Float16Magnitudes,
    Observed,
    StepAnswer,
)
from autoprec.core.dtypes import DType
from autoprec.core.recipe import Recipe

Snapshot = Sequence[Any]


class KerasTrainee:
    """One model with its optimizer under one recipe; see `Trainee`."""

    def __init__(self, task: Task, recipe: Recipe, seed: int, batch: Any, device: str) -> None:
        knobs = {k: v for k, v in recipe.knobs.items() if k != "steps_per_execution"}
        self._task, self._device = task, device
        self.model: Any = build_model(task, seed, batch)
        self.model.steps_per_execution = 1
        applied = for_whole_batches(replace(recipe, knobs=knobs), self.model)
        self.precision: Any = KerasSurgeon().apply(applied, model=self.model, device=device)
        self.model.make_train_function()
        self._gradient_function: Any = None
        self._observing_function: Any = None
        self._evaluation: Evaluation | None = None
        self._draws = DrawsFromState() if on_tensorflow() else None
        self._state = state_variables(self.model)
        self._buffers, self._seeds = _buffer_paths(self.model), _seeds(self.model)
        self._whole_numbers = {
            path for index, path in self._buffers.items() if _is_whole(self._state[index])
        }
        if self._draws is not None:
            self._state.append(self._draws.variable)
        self._left: Mapping[str, Any] = {}
        self._drew = False
        self._readers: dict[Any, magnitudes.StepReader] = {}

    @property
    def scale(self) -> float:
        """Return the loss scale, 1 without one."""
        return float(self.precision.scale)

    def train_step(
        self, batches: Iterator[tuple[Any, int]], answer: StepAnswer | None = None
    ) -> tuple[float, bool]:
        """Train one update; return the mean loss before it, and whether it was skipped.

        The model's own step shows no gradient, so that `answer` stays as it is.
        """
        before, losses = self.precision.skipped, []
        for batch, _ in batches:
            self.model.reset_metrics()
            feed = iter([batch]) if on_tensorflow() else [batch]
            with self._drawn_alike(), raising_layers_noted(self.model):
                losses.append(to_float(loss_in_logs(self.model.train_function(feed))))
            if self._draws is not None:
                self._draws.variable.assign_add(1)
        return sum(losses) / len(losses), self.precision.skipped > before

    def loss(self, batch: Any, seed: int) -> float:
        """Return the loss of one batch; the state stays as it is."""
        return self.loss_and_gradient(batch, seed)[0]

    def loss_and_gradient(self, batch: Any, seed: int) -> tuple[float, list[Any]]:
        """Return the loss and the float32 gradient of one batch; the state stays as it is."""
        if self._gradient_function is None:
            self._gradient_function = gradient_function(self.model)
        loss, gradients = self._run(self._gradient_function, batch)
        return to_float(loss), self._unscaled(gradients)

    def _run(self, function: Any, batch: Any) -> Any:
        """Return what a function of (batch, scale) gives; the state stays as it is."""
        kept = self.take_state()
        self.model.reset_metrics()
        with self._drawn_alike(), raising_layers_noted(self.model):
            found = function(batch, self.precision.scale)
        if self._buffers:
            self._left = self.buffers(self.take_state(), exact=True)
        self._drew = self._seeds_moved(kept) or (self._draws is not None and self._draws.drawn)
        self.put_back(kept)
        return found

    @contextlib.contextmanager
    def _drawn_alike(self) -> Iterator[None]:
        """Draw the same numbers inside as every run does in the same state."""
        hosts = contextlib.nullcontext() if self._draws is None else self._draws.hosts()
        with same_in_every_dtype(self._draws), hosts:
            yield

    def _unscaled(self, gradients: Sequence[Any]) -> list[Any]:
        scale = np.float32(self.precision.scale)
        return [to_numpy(gradient) / scale for gradient in gradients]

    def loss_and_gradient_watched(
        self, batch: Any, seed: int
    ) -> tuple[float, list[Any], Float16Magnitudes]:
        """Read the step's float16 numbers from its graph, where it can be read, then the rest."""
        policy, compiled = self.precision.policy, self.precision.recipe.compile
        found = Float16Magnitudes()
        if policy.compute_dtype is DType.FLOAT16 and not compiled and on_tensorflow():
            try:
                reader = self.step_reader(batch, "float16")
                found = magnitudes.float16_magnitudes(reader, batch, self.scale)
            except Exception:
                if not self.model.run_eagerly:  # a step that looks at values has no graph
                    raise
        return *self.loss_and_gradient(batch, seed), found

    def step_reader(self, batch: Any, *dtypes: str) -> magnitudes.StepReader:
        """Return what reads tensors of `dtypes` of a step on batches shaped like `batch`."""
        key = dtypes, tuple(tuple(leaf.shape) for leaf in keras.tree.flatten(batch))
        if key not in self._readers:
            self._readers = {key: magnitudes.StepReader(self, batch, dtypes)}
        return self._readers[key]

    def take_state(self) -> Snapshot:
        """Copy the state."""
        return [to_numpy(v) for v in self._state]

    def put_back(self, state: Snapshot) -> None:
        """Load a copied state."""
        for variable, value in zip(self._state, state, strict=True):
            variable.assign(value)

    def state_bytes(self) -> int:
        """Return the size of a copy of the state in bytes."""
        return sum(size_in_bytes(variable) for variable in self._state)

    def buffers(self, state: Snapshot | None = None, *, exact: bool = False) -> Mapping[str, Any]:
        """Return the buffers of a copied state, or as the last batch left them.

        Those of whole numbers and truth values only with `exact`.
        """
        if state is None:
            found = self._left
        else:
            found = {path: _vector(state[index]) for index, path in self._buffers.items()}
        return {p: values for p, values in found.items() if exact or p not in self._whole_numbers}

    def scale_buffers(self, state: Snapshot, names: Collection[str], factor: float) -> Snapshot:
        """Return a copied state with these buffers multiplied by a factor."""
        return [
            value * factor if self._buffers.get(index) in names else value
            for index, value in enumerate(state)
        ]

    def add_noise(self, draw: int, size: float = NOISE) -> None:
        """Multiply every weight by 1 + uniform(-size, size), drawn from seed `draw`."""
        random = np.random.default_rng(draw)
        for variable in self.model.trainable_variables:
            value = to_numpy(variable)
            factor = 1.0 + random.uniform(-size, size, value.shape)
            variable.assign((value * factor).astype(value.dtype))

    def _seeds_moved(self, before: Snapshot) -> bool:
        """Say whether random numbers were drawn: seeds are part of the state."""
        return any(
            not np.array_equal(before[index], to_numpy(self._state[index])) for index in self._seeds
        )

    @property
    def rounding(self) -> float:
        """Return the size of noise on the weights that the task's own rounding stays below.

        An accelerator may compute products in TF32, which TensorFlow does unless told not to.
        """
        dtypes = {v.dtype for v in self.model.trainable_variables}
        dtypes |= {each.compute_dtype for each in self.model._flatten_layers()}
        if any(is_low(each) for each in dtypes):
            return NOISE
        return EXACT_NOISE if self._device == "cpu" else TF32_NOISE

    def observe(self, parts: Sequence[tuple[Any, int]]) -> Observed:
        """Return what the parts of one batch give; see `Trainee`."""
        if self._observing_function is None:
            self._observing_function = observing_function(self.model)
        losses, gradients, outputs, drew = [], [], [], False
        for batch, _ in parts:
            loss, gradient, shown = self._run(self._observing_function, batch)
            losses.append(to_float(loss))
            gradients.append(self._unscaled(gradient))
            samples = count_samples(self._task, batch)
            outputs.append(Outputs([to_numpy(each) for each in shown], samples))
            drew |= self._drew
        mean = [sum(each) / np.float32(len(parts)) for each in zip(*gradients, strict=True)]
        seen = any(each.matrices for each in outputs)
        return Observed(sum(losses) / len(losses), mean, outputs if seen else (), drew)

    def weight_changes(self, updates: Sequence[Sequence[tuple[Any, int]]]) -> list[Any]:
        """Train the updates; return how far every weight moved."""
        before = [to_numpy(v) for v in self.model.trainable_variables]
        for update in updates:
            self.train_step(iter(update))
        pairs = zip(self.model.trainable_variables, before, strict=True)
        return [to_numpy(variable) - value for variable, value in pairs]

    def without_dropout(self) -> AbstractContextManager[None]:
        """Switch dropout and noise off inside; what is traced there stays without them."""
        return without_dropout(layer_units(self.model))

    def evaluate(self) -> float:
        """Call the task's `evaluate`."""
        assert self._task.evaluate is not None
        return float(self._task.evaluate(self.model))

    def evaluate_watched(self, seed: int) -> Evaluated:
        """Call it without looking at outputs: what it calls is compiled by then."""
        generators = KerasGenerators()
        before = generators.capture()
        keras.utils.set_random_seed(seed)
        try:
            return Evaluated(self.evaluate())
        finally:
            generators.restore(before)

    def evaluate_batch(self, batch: Any, seed: int) -> Evaluated | None:
        """Run the model's own `test_step`."""
        if self._evaluation is None:
            self._evaluation = Evaluation(self.model)
        try:
            loss, shown = self._run(self._evaluation, batch)
        except Exception as error:
            return Evaluated(None, (), error)
        outputs = Outputs([to_numpy(each) for each in shown], count_samples(self._task, batch))
        value = to_float(loss)
        return Evaluated(
            None if math.isnan(value) else value,
            [outputs] if outputs.matrices else (),
            self._evaluation.error,
        )

    def close(self) -> None:
        """Restore the process's settings, and free the memory."""
        memory = VariableMemory(self.model)
        self.precision.restore()
        self.model = self.precision = None
        self._state = []
        self._gradient_function = self._observing_function = self._evaluation = None
        self._readers.clear()
        gc.collect()
        memory.free()


def _seeds(model: Any) -> list[int]:
    """List the positions in a model's state of what generators of random numbers hold."""
    untracked = untracked_variables(model, layer_units(model))
    drawn = {id(each.variable) for each in untracked if each.draws}
    return [
        index
        for index, variable in enumerate(state_variables(model))
        if id(variable) in drawn or "seed_generator" in getattr(variable, "path", "")
    ]


def _buffer_paths(model: Any) -> dict[int, str]:
    """Map positions in a model's state to the paths of buffers: what changes without an optimizer.

    They are weights that nothing trains, and variables that Keras does not know. The seeds of
    dropout are none, nor are texts. Every build of the model gives the same paths.
    """
    untracked = untracked_variables(model, layer_units(model))
    paths = {id(each.variable): each.path for each in untracked if not each.draws}
    for unit in layer_units(model):  # parents first: the deepest layer names a weight
        for layer in unit.members:
            for each in layer.non_trainable_weights:
                paths[id(each)] = f"{unit.path}/{each.name}".lstrip("/")
    found: dict[int, str] = {}
    seeds = _seeds(model)
    for index, variable in enumerate(state_variables(model)):
        path = paths.get(id(variable))
        text = keras.backend.standardize_dtype(variable.dtype) == "string"
        if path is not None and index not in seeds and not text:
            found[index] = path if path not in found.values() else f"{path} ({index})"
    return found


def _is_whole(variable: Any) -> bool:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return not ("float" in dtype or "complex" in dtype)


def _vector(value: Any) -> Any:
    values = np.ravel(value)
    parts = np.stack([values.real, values.imag]) if np.iscomplexobj(values) else values
    return np.ravel(parts)[:: 1 + parts.size // MOST_VALUES].astype(np.float64)


def gradient_error(candidate: Sequence[Any], reference: Sequence[Any]) -> float | None:
    """Return ||g - g32|| / ||g32|| over all weights, None where it is not finite."""
    difference = total = 0.0
    for ours, theirs in zip(candidate, reference, strict=True):
        difference += float(np.sum(np.square(np.abs(ours - theirs).astype(np.float64))))
        total += float(np.sum(np.square(np.abs(theirs).astype(np.float64))))
    return relative_error(difference, total)
