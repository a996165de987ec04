"""Traces a Keras task for `autoprec.backends.shared.tracer`.

The step is the model's own train_step, compiled as the recipe says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras

from autoprec.backends.keras.devices import placed_on
from autoprec.backends.keras.trace import magnitudes
from autoprec.backends.keras.trace.model_under_recipe import KerasTrainee, gradient_error
from autoprec.backends.keras.train.batch_dimension import count_samples, slice_samples
from autoprec.backends.keras.train.batch_views import copy_leaf, survey
from autoprec.backends.keras.train.data import batches, digest, size_in_bytes, to_tensors
from autoprec.backends.keras.train.recorded_outputs import outputs_error
from autoprec.backends.protocol import ProgressCallback, Task
from autoprec.backends.shared.batch_survey import TIMED_AGAIN
from autoprec.backends.shared.gradient_exponents import ExponentCounts
from autoprec.backends.shared.initial_states import InitialStates
from autoprec.backends.shared.repeatable_batches import MAX_KEPT_BYTES, BatchStream
from autoprec.backends.shared.tracer import ComparisonTracer
from autoprec.core.numerics.traces import UnitTrace
from autoprec.core.recipe import Recipe


class KerasTracing:
    """See `TraceFramework`.

    The random numbers of dropout are part of a model's state, so that batches need no seeds.
    """

    def __init__(self, task: Task, *, device: str, seed: int) -> None:
        self._task, self._device, self._seed = task, device, seed
        self._initial = InitialStates()
        self.has_evaluate = task.evaluate is not None

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Place what is built and run inside on the device."""
        return placed_on(self._device)

    def stream(self, batch_size: int, seed: int) -> BatchStream:
        """Return the task's batches."""
        return batch_stream(self._task, batch_size, self._seed + seed)

    @contextlib.contextmanager
    def trainee(
        self, recipe: Recipe, seed: int, batch: Any, *, reference: bool
    ) -> Iterator[KerasTrainee]:
        """Build the model under `recipe`; the reference goes by the same train function."""
        trainee = KerasTrainee(self._task, recipe, self._seed + seed, batch, self._device)
        try:
            self._initial.start_alike(seed, trainee.take_state, trainee.put_back)
            yield trainee
        finally:
            trainee.close()

    def gradient_error(self, candidate: Any, reference: Any) -> float | None:
        """Compare two gradients over all weights."""
        return gradient_error(candidate, reference)

    def outputs_error(self, candidate: Any, reference: Any) -> float | None:
        """Compare the outputs of whole batches, or of their parts, with those of whole ones."""
        return outputs_error(candidate, reference)

    def parts(self, batch: Any, batch_size: int, count: int) -> Sequence[Any] | None:
        """Cut every array that has its samples in the first dimension."""
        samples = count_samples(self._task, batch)
        size, left = divmod(samples, count)
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in keras.tree.flatten(batch)]
        if left or not size or not any(shape[:1] == (samples,) for shape in shapes):
            return None
        return [slice_samples(batch, samples, i * size, (i + 1) * size) for i in range(count)]

    def count_exponents(
        self, counts: ExponentCounts, trainee: KerasTrainee, batch: Any, seed: int
    ) -> None:
        """Add one batch's backward pass."""
        reader = trainee.step_reader(batch, "bfloat16")
        counts.add(*magnitudes.backward_magnitudes(reader, batch))

    def unit_magnitudes(
        self, trainee: KerasTrainee, batch: Any, seed: int, scale: float
    ) -> tuple[UnitTrace, ...]:
        """Measure each layer's largest exponents, and its gradient's float16 underflow."""
        reader = trainee.step_reader(batch, "bfloat16", "float32")
        return magnitudes.by_unit(reader, batch, scale)


def keras_tracer(
    task: Task, *, device: str, seed: int, report: ProgressCallback
) -> ComparisonTracer:
    """Return the tracer of a Keras task; see `Backend.tracer`."""
    tracing = KerasTracing(task, device=device, seed=seed)
    return ComparisonTracer(tracing, on_cpu=device == "cpu", report=report)


class KerasBatches:
    """See `BatchOperations`: batches are stored as they come, and handed out as tensors."""

    def store(self, batch: Any) -> Any:
        """Copy every array that the user could change."""
        return keras.tree.map_structure(copy_leaf, batch)

    def hand_out(self, stored: Any) -> Any:
        """Return the batch as new tensors."""
        return to_tensors(keras.tree.map_structure(copy_leaf, stored))

    def digest(self, stored: Any) -> str:
        """Return a hash of the batch."""
        return digest(stored)

    def size_in_bytes(self, stored: Any) -> int:
        """Return the bytes of all arrays in the batch."""
        return size_in_bytes(stored)


def batch_stream(
    task: Task, batch_size: int, seed: int, keep_bytes: int = MAX_KEPT_BYTES
) -> BatchStream:
    """Return the task's batches of one size and seed.

    Large ones are looked for where a description of the task saw batches that differ in shape.
    """

    def elsewhere() -> list[Any]:
        if not task.surveyed:
            return []
        limits = replace(TIMED_AGAIN, batches=task.surveyed)
        seen = survey(task, batch_size, seed, limits)
        return [seen.kept[index] for index in seen.largest()]

    draw = partial(batches, task, batch_size, seed, repeat=True)
    return BatchStream(draw, KerasBatches(), keep_bytes, elsewhere)
