"""What is compared starts alike, sees the same batches and seeds, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from autoprec.backends.shared import checkpoint_budget
from autoprec.backends.shared.initial_states import InitialStates
from autoprec.backends.shared.repeatable_batches import BatchStream
from autoprec.backends.shared.trace_framework import (
    EXACT_NOISE,
    NOISE,
    Float16Magnitudes,
    Observed,
)
from autoprec.backends.shared.tracer import ComparisonTracer, batch_seed
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.traces import UnitTrace
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import UsageError

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

    def buffers(self, state: Any = None) -> dict[str, Any]:
        return {}

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

    def train_step(self, batches: Iterator[tuple[int, int]]) -> tuple[float, bool]:
        losses = []
        for batch, seed in batches:
            losses.append(self.loss(batch, seed))
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
        return self.loss(batch, seed), [self.value + self.off]

    def loss_and_gradient_watched(self, batch: int, seed: int) -> Any:
        return *self.loss_and_gradient(batch, seed), Float16Magnitudes(2.0, False, 0.5)

    def evaluate(self) -> float:
        return self.framework.metric()


class Numbers:
    """Batches that are numbers."""

    def store(self, batch: int) -> int:
        return batch

    def hand_out(self, stored: int) -> int:
        return stored

    def digest(self, stored: int) -> str:
        return str(stored)

    def size_in_bytes(self, stored: int) -> int:
        return 8


@dataclass
class Weights:
    """A framework whose every build begins with another weight, unless it starts alike."""

    skips: bool = False
    draws: bool = False
    off_by: dict[str, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    has_evaluate: bool = False
    metric: Any = None
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
        return BatchStream(lambda: iter(range(1000 * seed, 1000 * seed + 1000)), Numbers(), 40)

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


def test_runs_of_one_seed_start_from_the_same_weights_and_others_do_not():
    traced, _ = tracer()
    first, again = (traced.trajectory(recipe=FLOAT32, seed=0, steps=3) for _ in range(2))
    assert first.losses == again.losses == (1.0, 1.5, 2.25)
    other = traced.trajectory(recipe=FLOAT32, seed=1, steps=3)
    assert [loss - 1000 for loss in other.losses] != list(first.losses)


def test_micro_batches_follow_each_other_each_with_a_seed_of_its_own():
    traced, framework = tracer()
    run = traced.trajectory(recipe=Recipe(batch_size=8, accumulation_steps=2), seed=0, steps=2)
    trained = [entry[1:] for entry in framework.log if entry[0] == "trained"]
    assert trained == [(step * 2 + i, batch_seed(0, step, i)) for step in (0, 1) for i in (0, 1)]
    assert run.losses == (1.5, 3.0)
    # Drawn one at a time: the second is not in memory while the first is trained on.
    assert [entry[0] for entry in framework.log] == ["loss", "trained"] * 4


def test_steps_are_compared_at_the_reference_s_weights_with_its_seeds():
    traced, framework = tracer()
    reference = traced.reference(batch_size=8, steps=4, checkpoints=(0, 3))
    framework.log.clear()
    first, last = traced.compare_steps(recipe=FLOAT16)
    for point in (first, last):
        assert point.reference == reference.losses[point.step]
        assert point.loss == point.reference + ERROR
        assert point.gradient_error == ERROR
        assert (point.largest, point.overflowed, point.backward) == (2.0, False, 0.5)
    assert (first.step, last.step) == (0, 3)
    assert ("loss", 3, batch_seed(0, 3, 0)) in framework.log
    assert framework.log.count(("loss", 0, batch_seed(0, 0, 0))) == 2


def test_float32_is_asked_once_for_all_that_is_compared():
    traced, framework = tracer()
    traced.reference(batch_size=8, steps=2, checkpoints=(0,))
    traced.compare_steps(recipe=FLOAT16)
    framework.log.clear()
    traced.compare_steps(recipe=FLOAT16)
    assert [entry[:2] for entry in framework.log] == [("loss", 0)]


def test_late_losses_are_means_over_the_batches_that_are_kept():
    traced, _ = tracer()
    traced.reference(batch_size=8, steps=61, checkpoints=(60,))
    (point,) = traced.compare_steps(recipe=FLOAT16)
    assert point.mean_reference == pytest.approx(sum(range(5)) / 5, abs=1e-6)
    assert point.mean_loss == pytest.approx(point.mean_reference + ERROR)


def test_noise_is_drawn_anew_at_every_checkpoint():
    traced, _ = tracer()
    traced.reference(batch_size=8, steps=3, checkpoints=(0, 2))
    points = traced.noise(draws=2)
    assert [point.step for point in points] == [0, 0, 2, 2]
    assert len({point.loss for point in points}) == 4
    assert all(0 < point.gradient_error < 2.0**-9 for point in points)


def test_a_comparison_needs_a_reference():
    traced, _ = tracer()
    with pytest.raises(UsageError, match="reference"):
        traced.compare_steps(recipe=FLOAT16)


def test_checkpoints_are_kept_as_far_as_memory_has_room(monkeypatch):
    monkeypatch.setattr(checkpoint_budget, "MAX_CHECKPOINT_BYTES", 400)
    traced, _ = tracer()
    traced.reference(batch_size=8, steps=4, checkpoints=(0, 1, 3))
    assert [point.step for point in traced.compare_steps(recipe=FLOAT16)] == [0, 3]


@pytest.mark.parametrize("skips", [False, True])
def test_a_run_tells_its_scales_and_the_steps_it_skipped(skips):
    traced, _ = tracer(skips=skips)
    run = traced.trajectory(recipe=FLOAT16, seed=0, steps=2)
    assert run.scales == (4.0, 4.0)
    assert run.skipped == ((0, 1) if skips else ())
    assert traced.trajectory(recipe=FLOAT32, seed=0, steps=2).scales == ()


def test_losses_that_are_not_finite_are_none():
    traced, _ = tracer(losses={1: math.inf}, has_evaluate=True, metric=lambda: math.nan)
    run = traced.trajectory(recipe=FLOAT32, seed=0, steps=3)
    assert run.losses == (1.0, None, 2.25)
    assert run.metric is None


def test_a_run_that_settles_ends_where_its_loss_no_longer_falls():
    traced, _ = tracer(losses=dict.fromkeys(range(480), 1.0))
    assert len(traced.reference(batch_size=8, steps=480, checkpoints=()).losses) == 480
    ended = traced.reference(batch_size=8, steps=480, checkpoints=(), stop_at_plateau=True)
    assert len(ended.losses) < 480


def test_nothing_stays_open_when_the_user_s_code_fails():
    def fail() -> float:
        raise RuntimeError("the user's own")

    traced, framework = tracer(has_evaluate=True, metric=fail)
    with pytest.raises(RuntimeError, match="own"):
        traced.trajectory(recipe=FLOAT32, seed=0, steps=1)
    assert (framework.open_now, framework.placed) == ([], 0)


def test_exponents_are_read_under_bfloat16_at_every_kept_state_in_turn():
    traced, framework = tracer()
    traced.reference(batch_size=8, steps=3, checkpoints=(0, 2))
    found = traced.backward_exponents(recipe=FLOAT16, batches=3)
    assert [entry[1:3] for entry in framework.log if entry[0] == "exponents"] == [
        (1.0, 0),
        (0.25, 1),
        (1.0, 2),
    ]
    read = framework.log[-1][3]
    assert (read.policy, read.loss_scale, read.compile) == (Policy.MIXED_BFLOAT16, None, False)
    assert (found.batches, found.largest) == (3, 0)


def test_units_are_read_at_the_recipes_scale():
    traced, _ = tracer()
    assert traced.unit_magnitudes(recipe=FLOAT16) == (UnitTrace("unit", 0, 4, 0.0),)


def test_batches_of_another_size_are_forgotten():
    traced, _ = tracer()
    for size in (8, 4):
        traced.reference(batch_size=size, steps=1, checkpoints=())
        assert list(traced._streams) == [(size, 0)]


def test_settings_are_compared_at_the_first_weights_batch_by_batch():
    traced, framework = tracer(off_by={"channels_last": 0.5})
    laid_out = Recipe(Policy.MIXED_BFLOAT16, 8, memory_format="channels_last")
    found = traced.compare_settings(recipe=laid_out)
    assert [point.batch for point in found.points] == [0, 1, 4, 13, 29]
    assert {point.outputs_error for point in found.points} == {0.5}
    assert all(point.loss - point.reference == 0.5 for point in found.points)
    assert max(point.outputs_error for point in found.noise) < 1e-6
    assert found.updates == 2
    recipes = [entry[1] for entry in framework.log if entry[0] == "observed"]
    assert {(each.policy, each.memory_format) for each in recipes} == {
        (Policy.FLOAT32, "contiguous"),
        (Policy.FLOAT32, "channels_last"),
    }
    assert not any(entry[2] for entry in framework.log)  # dropout stays on
    assert not framework.open_now


def test_micro_batches_are_the_unsplit_batch_s_samples_with_dropout_off():
    traced, framework = tracer()
    found = traced.compare_settings(recipe=Recipe(batch_size=4, accumulation_steps=2))
    assert found.points
    assert all(entry[2] for entry in framework.log)
    given = [(entry[1].batch_size, [part for part, _ in entry[3]]) for entry in framework.log]
    assert (8, [4]) in given
    assert (4, [4, 4.1]) in given


@pytest.mark.parametrize(
    ("given", "recipe", "why"),
    [
        (
            {"draws": True},
            Recipe(batch_size=4, accumulation_steps=2),
            "a step draws random numbers of its own besides dropout, so that its parts draw others",
        ),
        ({}, Recipe(batch_size=3, accumulation_steps=3), "a whole batch of 9 cannot be cut in 3"),
    ],
)
def test_where_parts_cannot_be_compared_it_says_why(given, recipe, why):
    traced, _ = tracer(**given)
    found = traced.compare_settings(recipe=recipe)
    assert found.points == ()
    assert found.not_covered == (why,)
