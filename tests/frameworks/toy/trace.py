"""What the toy framework does for a trace: the rest is the shared `ComparisonTracer`."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from autoprec.backends.protocol import Task
from autoprec.backends.shared.gradient_exponents import ExponentCounts, exponent_of, weighted_shares
from autoprec.backends.shared.initial_states import InitialStates
from autoprec.backends.shared.repeatable_batches import BatchStream
from autoprec.backends.shared.trace_framework import (
    EXACT_NOISE,
    NOISE,
    Evaluated,
    Float16Magnitudes,
    Observed,
    StepAnswer,
)
from autoprec.core.numerics.traces import UnitTrace
from autoprec.core.recipe import Recipe
from toy.framework import Batch, Gradient, Linear


class BatchesInMemory:
    """A batch is plain lists: see `BatchOperations`."""

    def store(self, batch: Batch) -> Batch:
        return copy.deepcopy(batch)

    def hand_out(self, stored: Batch) -> Batch:
        return copy.deepcopy(stored)

    def digest(self, stored: Batch) -> str:
        return hashlib.sha256(repr(stored).encode()).hexdigest()

    def size_in_bytes(self, stored: Batch) -> int:
        return 8 * sum(len(row) + 1 for row in stored[0])


class ToyTrainee:
    """A model under a recipe; see `autoprec.backends.shared.tracer.Trainee`."""

    def __init__(self, task: Task, recipe: Recipe, seed: int) -> None:
        random.seed(seed)
        self.model: Linear = task.build_model()
        self.model.dtype = str(recipe.policy.compute_dtype)
        self.scale = recipe.loss_scale.initial if recipe.loss_scale is not None else 1.0
        self._task = task

    def take_state(self) -> list[float]:
        return list(self.model.values)

    def put_back(self, state: list[float]) -> None:
        self.model.values = list(state)

    def state_bytes(self) -> int:
        return 8 * len(self.model.values)

    def buffers(self, state: Any = None, *, exact: bool = False) -> dict[str, Any]:
        return {}

    def scale_buffers(self, state: Any, names: Any, factor: float) -> Any:
        return state

    rounding = EXACT_NOISE

    def add_noise(self, draw: int, size: float = NOISE) -> None:
        noise = random.Random(draw)
        self.model.values = [v * (1 + noise.uniform(-size, size)) for v in self.model.values]

    def observe(self, parts: Sequence[tuple[Batch, int]]) -> Observed:
        losses, gradients = zip(
            *(self.model.loss_and_gradient(batch) for batch, _ in parts), strict=True
        )
        values = zip(*(gradient.values for gradient in gradients), strict=True)
        mean = Gradient(tuple(sum(each) / len(parts) for each in values))
        return Observed(sum(losses) / len(losses), mean, ())

    def weight_changes(self, updates: Sequence[Sequence[tuple[Batch, int]]]) -> Gradient:
        before = self.take_state()
        for update in updates:
            self.train_step(iter(update))
        return Gradient(tuple(a - b for a, b in zip(self.model.values, before, strict=True)))

    def without_dropout(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def train_step(
        self, batches: Iterator[tuple[Batch, int]], answer: StepAnswer | None = None
    ) -> tuple[float, bool]:
        losses, gradients = zip(
            *(self.model.loss_and_gradient(batch) for batch, _ in batches), strict=True
        )
        parts = zip(*(gradient.values for gradient in gradients), strict=True)
        self.model.step(Gradient(tuple(sum(part) / len(part) for part in parts)))
        return sum(losses) / len(losses), False

    def loss(self, batch: Batch, seed: int) -> float:
        return self.model.loss_and_gradient(batch)[0]

    def loss_and_gradient(self, batch: Batch, seed: int) -> tuple[float, Gradient]:
        return self.model.loss_and_gradient(batch)

    def loss_and_gradient_watched(
        self, batch: Batch, seed: int
    ) -> tuple[float, Gradient, Float16Magnitudes]:
        return *self.model.loss_and_gradient(batch), Float16Magnitudes()

    def evaluate(self) -> float:
        assert self._task.evaluate is not None
        return float(self._task.evaluate(self.model))

    def evaluate_watched(self, seed: int) -> Evaluated:
        return Evaluated(self.evaluate())

    def evaluate_batch(self, batch: Batch, seed: int) -> Evaluated:
        return Evaluated(self.loss(batch, seed))


class ToyTrace:
    """See `autoprec.backends.shared.tracer.TraceFramework`."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._initial = InitialStates()
        self.has_evaluate = task.evaluate is not None

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def stream(self, batch_size: int, seed: int) -> BatchStream:
        def draw() -> Iterator[Batch]:
            random.seed(seed)
            return iter(self._task.build_data(batch_size))

        return BatchStream(draw, BatchesInMemory())

    @contextlib.contextmanager
    def trainee(
        self, recipe: Recipe, seed: int, batch: Batch, *, reference: bool
    ) -> Iterator[ToyTrainee]:
        trainee = ToyTrainee(self._task, recipe, seed)
        self._initial.start_alike(seed, trainee.take_state, trainee.put_back)
        yield trainee

    def outputs_error(self, candidate: Any, reference: Any) -> float:
        return 0.0

    def parts(self, batch: Batch, batch_size: int, count: int) -> list[Batch]:
        size = batch_size // count
        rows, targets = batch
        spans = [slice(i * size, (i + 1) * size) for i in range(count)]
        return [(rows[span], targets[span]) for span in spans]

    def gradient_error(self, candidate: Gradient, reference: Gradient) -> float | None:
        difference = Gradient(
            tuple(a - b for a, b in zip(candidate.values, reference.values, strict=True))
        )
        error = difference.norm() / reference.norm()
        return error if math.isfinite(error) else None

    def count_exponents(
        self, counts: ExponentCounts, trainee: ToyTrainee, batch: Batch, seed: int
    ) -> None:
        _, gradient = trainee.model.loss_and_gradient(batch)
        exponents = Counter(exponent_of(abs(value)) for value in gradient.values if value)
        largest = max(abs(value) for value in gradient.values)
        counts.add([largest], weighted_shares([(gradient.norm(), exponents)]))

    def unit_magnitudes(
        self, trainee: ToyTrainee, batch: Batch, seed: int, scale: float
    ) -> tuple[UnitTrace, ...]:
        _, gradient = trainee.model.loss_and_gradient(batch)
        return (UnitTrace("linear", 2, exponent_of(gradient.norm()), 0.0),)
