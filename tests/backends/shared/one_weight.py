"""A framework whose models are one weight, for tests of what the shared tracer does with them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

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
from autoprec.backends.shared.tracer import ComparisonTracer
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.traces import UnitTrace
from autoprec.core.recipe import LossScale, Recipe

FLOAT32 = Recipe(batch_size=8)
FLOAT16 = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale(initial=4.0))
ERROR = 0.125


@dataclass
class Weight:
    """A model of one weight that a step moves to the mean of its batches; float16 is off a bit."""

    framework: Weights
    recipe: Recipe
    value: float
    quiet: bool = False

    @property
    def scale(self) -> float:
        return self.recipe.loss_scale.initial if self.recipe.loss_scale else 1.0

    def take_state(self) -> float:
        return self.value

    def put_back(self, state: float) -> None:
        self.value = state

    def state_bytes(self) -> int:
        return 100

    def buffers(self, state: Any = None, *, exact: bool = False) -> dict[str, Any]:
        now = self.framework.left.get(self.recipe.memory_format)
        return {} if now is None else {"mean": np.array([0.0 if state is not None else now])}

    def scale_buffers(self, state: Any, names: Any, factor: float) -> Any:
        return state

    rounding = EXACT_NOISE

    def add_noise(self, draw: int, size: float = NOISE) -> None:
        self.value *= 1 + size * (draw + 1) / 100

    def observe(self, parts: list[tuple[int, int]]) -> Observed:
        self.framework.log.append(("observed", self.recipe, self.quiet, parts))
        value = self.value + self.framework.off_by.get(self.recipe.memory_format, 0.0)
        losses = [value + part for part, _ in parts]
        return Observed(sum(losses) / len(losses), [value], [value], self.framework.draws)

    def weight_changes(self, updates: list[list[tuple[int, int]]]) -> list[float]:
        for update in updates:
            self.framework.log.append(("trained", self.recipe, self.quiet, update))
            self.value /= 2
        return [self.value]

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        self.quiet = True
        yield
        self.quiet = False

    def train_step(
        self, batches: Iterator[tuple[int, int]], answer: StepAnswer | None = None
    ) -> tuple[float, bool]:
        losses = []
        for batch, seed in batches:
            losses.append(self.loss(batch, seed))
            if answer is not None and not answer.known and self.framework.answers:
                answer.known, answer.loss = True, losses[-1]
                answer.gradient = self.gradient(batch)
                answer.buffers = self.buffers()
            self.framework.log.append(("trained", batch, seed))
        self.value /= 2
        return sum(losses) / len(losses), self.framework.skips

    def loss(self, batch: int, seed: int) -> float:
        self.framework.log.append(("loss", batch, seed))
        return self.framework.losses.get(batch, abs(self.value) + batch + self.off)

    @property
    def off(self) -> float:
        return 0.0 if self.recipe.policy is Policy.FLOAT32 else ERROR

    def loss_and_gradient(self, batch: int, seed: int) -> tuple[float, list[float]]:
        return self.loss(batch, seed), self.gradient(batch)

    def gradient(self, batch: int) -> list[float]:
        return [self.value + self.off + self.framework.gradient_noise * batch]

    def loss_and_gradient_watched(self, batch: int, seed: int) -> Any:
        return *self.loss_and_gradient(batch, seed), Float16Magnitudes(2.0, False, 0.5)

    def evaluate(self) -> float:
        return self.framework.metric()

    def evaluate_watched(self, seed: int) -> Evaluated:
        return Evaluated(self.evaluate(), [self.value])

    def evaluate_batch(self, batch: Any, seed: int) -> Evaluated:
        return self.framework.evaluated(self, batch)


class Numbers:
    """Batches that are numbers."""

    def store(self, batch: int) -> int:
        return batch

    def hand_out(self, stored: int) -> int:
        return stored

    def digest(self, stored: int) -> str:
        return str(stored)

    sizes: Mapping[int, int] = MappingProxyType({})

    def size_in_bytes(self, stored: int) -> int:
        return self.sizes.get(stored, 8)


@dataclass
class Weights:
    """A framework whose every build begins with another weight, unless it starts alike."""

    skips: bool = False
    answers: bool = True
    draws: bool = False
    off_by: dict[str, float] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    has_evaluate: bool = False
    metric: Any = None
    evaluated: Any = lambda weight, batch: Evaluated(weight.value, [weight.value])
    gradient_noise: float = 0.0
    sizes: dict[int, int] = field(default_factory=dict)
    log: list[Any] = field(default_factory=list)
    open_now: list[Any] = field(default_factory=list)
    placed: int = 0
    initial: InitialStates = field(default_factory=InitialStates)
    builds: Any = field(default_factory=lambda: itertools.count(1))

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        self.placed += 1
        try:
            yield
        finally:
            self.placed -= 1

    def stream(self, batch_size: int, seed: int) -> BatchStream:
        assert self.placed
        numbers = Numbers()
        numbers.sizes = self.sizes
        return BatchStream(lambda: iter(range(1000 * seed, 1000 * seed + 1000)), numbers, 40)

    @contextlib.contextmanager
    def trainee(self, recipe: Recipe, seed: int, batch: int, *, reference: bool) -> Iterator[Any]:
        assert self.placed
        assert batch == 1000 * seed
        assert not (reference and recipe.policy is not Policy.FLOAT32)
        built = Weight(self, recipe, float(next(self.builds)))
        self.initial.start_alike(seed, built.take_state, built.put_back)
        self.open_now.append(built)
        try:
            yield built
        finally:
            self.open_now.remove(built)

    def outputs_error(self, candidate: list[float], reference: list[float]) -> float:
        return abs(candidate[0] - reference[0])

    def parts(self, batch: int, batch_size: int, count: int) -> list[float] | None:
        return [batch + i / 10 for i in range(count)] if batch_size % 2 == 0 else None

    def gradient_error(self, candidate: list[float], reference: list[float]) -> float:
        return abs(candidate[0] - reference[0])

    def count_exponents(self, counts: Any, trainee: Weight, batch: int, seed: int) -> None:
        self.log.append(("exponents", trainee.value, batch, trainee.recipe))
        counts.add([trainee.value], {0: 1.0})

    def unit_magnitudes(
        self, trainee: Weight, batch: int, seed: int, scale: float
    ) -> tuple[UnitTrace, ...]:
        return (UnitTrace("unit", batch, int(scale), 0.0),)


def tracer(**given: Any) -> tuple[ComparisonTracer, Weights]:
    framework = Weights(**given)
    return ComparisonTracer(framework, on_cpu=False, report=lambda *_: None), framework
