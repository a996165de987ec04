"""A time limit holds with long steps and slow compilers: nothing is begun that would not end."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated import backend

from autoprec.api import tune
from autoprec.backends import registry
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.numerics.traces import NoisyStep, SettingsComparison, StepComparison, Trajectory
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.tuning.events import Described, Event, Stage, TrialFinished

pytestmark = pytest.mark.usefixtures("unmeasured", "in_process")

TASK = """
from simulated import SimulatedModel

BATCH_SIZE = 16

def build_model():
    return SimulatedModel(
        overhead={{"float32": {step}, "mixed_bfloat16": {step} / 2}},
        per_sample={{"float32": 0.0}},
        compiled=0.8,
    )

def build_data(batch_size):
    return []
"""

EVALUATE = """
def evaluate(model):
    return 0.9
"""

#: What a simulated comparison takes, in float32 steps at the recipe's batch.
SETTINGS, CHECKPOINT = 25, 3

#: The steps of a description that are needed, and those that may be left out.
NEEDED, FURTHER = 6, 20


class Clock:
    """The time, which passes only where a simulated model compiles, steps or trains."""

    def __init__(self) -> None:
        self.now, self.step, self.compiling, self.evaluating = 0.0, 0.0, 0.0, 0.0

    def __call__(self) -> float:
        return self.now

    def seconds_of(self, recipe: Recipe) -> float:
        return self.step * (0.5 if recipe.policy.mixed else 1.0) * (0.8 if recipe.compile else 1.0)

    def prepare(self, recipe: Recipe) -> None:
        self.now += self.compiling if recipe.compile else 0.0

    def train(self, recipe: Recipe, run: Trajectory, seconds: float | None) -> Trajectory:
        """Let the run take its time, and end after the step in which that is up."""
        began = self.now
        self.prepare(recipe)
        each, steps = self.seconds_of(recipe), 0
        while steps < len(run.losses) and (
            seconds is None or not steps or self.now < began + seconds
        ):
            self.now += each
            steps += 1
        self.now += self.evaluating
        metric, took = 0.9 if self.evaluating else None, steps * each + self.evaluating
        run = replace(run, seconds=took, step_seconds=each, metric=metric)
        return replace(run, losses=run.losses[:steps])


class Session(backend.SimulatedSession):
    """One whose steps take what they say; the first one comes with the session."""

    clock: Clock

    def __init__(self, model: Any, recipe: Recipe, *rest: Any) -> None:
        super().__init__(model, recipe, *rest)
        began = self.clock.now
        self.clock.prepare(recipe)
        self.clock.now += self.clock.seconds_of(recipe)
        self.ready = self.clock.now - began

    def time_steps(self, budget: TimingBudget) -> Measurement:
        measured = super().time_steps(budget)
        self.clock.now += measured.steps * measured.step_seconds
        return replace(measured, warmup_seconds=self.ready)


class Tracer(backend.SimulatedTracer):
    """One whose runs and comparisons take what their steps do."""

    clock: Clock

    def reference(self, *, seconds: float | None = None, **how: Any) -> Trajectory:
        return self.clock.train(Recipe(batch_size=16), super().reference(**how), seconds)

    def trajectory(self, *, recipe: Recipe, seconds: float | None = None, **how: Any) -> Trajectory:
        return self.clock.train(recipe, super().trajectory(recipe=recipe, **how), seconds)

    def compare_steps(self, *, recipe: Recipe) -> tuple[StepComparison, ...]:
        self.clock.prepare(recipe)
        found = super().compare_steps(recipe=recipe)
        self.clock.now += CHECKPOINT * len(found) * self.clock.step
        return found

    def compare_settings(self, *, recipe: Recipe) -> SettingsComparison:
        self.clock.prepare(recipe)
        self.clock.now += SETTINGS * self.clock.step + 4 * self.clock.evaluating
        return super().compare_settings(recipe=recipe)

    def noise(self, *, draws: int) -> tuple[NoisyStep, ...]:
        found = super().noise(draws=draws)
        self.clock.now += len(found) * self.clock.step
        return found


class Backend(backend.SimulatedBackend):
    """One whose description takes what its steps do; it leaves out some when time is up."""

    clock: Clock

    def describe(self, task: Task, **how: Any) -> TaskFacts:
        most = task.describing_seconds
        left_out = most is not None and NEEDED * self.clock.step >= most
        self.clock.now += (NEEDED + (0 if left_out else FURTHER)) * self.clock.step
        return replace(super().describe(task, **how), split_reason="left out" if left_out else "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let simulated sessions and trainings take time, and nothing else."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(Backend, "clock", clock, raising=False)
    monkeypatch.setattr(Session, "clock", clock, raising=False)
    monkeypatch.setattr(Tracer, "clock", clock, raising=False)
    monkeypatch.setattr(backend, "SimulatedBackend", Backend)
    monkeypatch.setattr(registry, "load", lambda name: Backend())
    monkeypatch.setattr(backend, "SimulatedSession", Session)
    monkeypatch.setattr(backend, "SimulatedTracer", Tracer)
    return clock


def tuned(
    clock: Clock,
    folder: Path,
    limit: float,
    step: float,
    compiling: float = 0.0,
    evaluating: float = 0.0,
) -> tuple[Profile, list[Recipe], float]:
    """Tune a task whose float32 step takes so long; return what came, what ran, and the seconds."""
    clock.step, clock.compiling, clock.evaluating = step, compiling, evaluating
    task = folder / "slow_task.py"
    task.write_text(TASK.format(step=step) + (EVALUATE if evaluating else ""))
    events: list[Event] = []
    profile = tune(
        task,
        listener=events.append,
        policies=(Policy.FLOAT32, Policy.MIXED_BFLOAT16),
        compile=bool(compiling),
        time_limit=limit,
    )
    ran = [event.recipe for event in events if isinstance(event, TrialFinished)]
    return profile, ran, clock.now


@pytest.mark.parametrize("step", [0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 4.8, 10.0])
@pytest.mark.parametrize("limit", [60.0, 150.0])
def test_a_limit_holds_whatever_a_step_takes(
    clock: Clock, tmp_path: Path, limit: float, step: float
) -> None:
    """What is needed whatever the limit is a description, and a trial of float32."""
    profile, ran, seconds = tuned(clock, tmp_path, limit, step)
    assert seconds <= max(limit, (NEEDED + 4) * step)
    assert ran[0].policy is Policy.FLOAT32
    if profile.recipe.policy is Policy.FLOAT32:
        assert profile.evidence.not_covered


@pytest.mark.parametrize(("step", "most_steps"), [(0.1, 30), (0.3, 8)])
def test_a_check_that_calls_evaluate_is_as_long_as_ends_in_time(
    clock: Clock, tmp_path: Path, step: float, most_steps: int
) -> None:
    """A call takes five steps, and a second seed trains, for what is evaluated."""
    profile, _, seconds = tuned(clock, tmp_path, 60.0, step, evaluating=5 * step)
    assert seconds <= 60.0
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert profile.evidence.parity.most_steps == most_steps
    assert not [each for each in profile.evidence.not_covered if "check" in each]


@pytest.mark.parametrize("compiling", [5.0, 30.0, 60.0, 90.0])
@pytest.mark.parametrize("step", [0.05, 1.0])
def test_a_limit_holds_with_slow_compilers(
    clock: Clock, tmp_path: Path, step: float, compiling: float
) -> None:
    _, ran, seconds = tuned(clock, tmp_path, 150.0, step, compiling)
    assert seconds <= 150.0
    assert any(recipe.policy is Policy.MIXED_BFLOAT16 for recipe in ran)
    assert sum(recipe.compile for recipe in ran) >= (1 if step < 1.0 else 0)


def test_nothing_is_compiled_that_may_not_end_in_time(clock: Clock, tmp_path: Path) -> None:
    """How long it takes is not known before: it would end, but that is not to be expected."""
    profile, ran, seconds = tuned(clock, tmp_path, 60.0, 0.05, 5.0)
    assert seconds <= 60.0
    assert not any(recipe.compile for recipe in ran)
    assert "recipes the search had no time to try" in profile.evidence.not_covered


def test_what_a_description_left_out_is_found_out_when_there_is_time(
    clock: Clock, tmp_path: Path
) -> None:
    """Six steps take 24 of the 12 seconds that a description may take of a minute."""

    def seconds_of_description(limit: float | None) -> float:
        began = clock.now
        events: list[tuple[str, float]] = []

        def listen(event: Event) -> None:
            if isinstance(event, Stage):
                events.append((event.name, clock.now - began))
            if isinstance(event, Described):
                events.append(("described", clock.now - began))

        tune(task, listener=listen, policies=(Policy.FLOAT32,), time_limit=limit, trials=1)
        begins = dict(reversed(events)).get("preflight")
        return 0.0 if begins is None else dict(events)["described"] - begins

    clock.step = 4.0
    task = tmp_path / "slow_task.py"
    task.write_text(TASK.format(step=4.0))
    assert seconds_of_description(60.0) == pytest.approx(24.0)
    assert seconds_of_description(None) == pytest.approx(104.0)
    assert seconds_of_description(61.0) == 0.0


def test_time_that_suffices_is_used(clock: Clock, tmp_path: Path) -> None:
    profile, _, seconds = tuned(clock, tmp_path, 600.0, 0.2)
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert profile.evidence.speedup.ratio == pytest.approx(2.0, rel=0.1)
    assert profile.evidence.not_covered == ()
    assert seconds < 300.0
