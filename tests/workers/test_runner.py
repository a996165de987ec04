"""Trials: how each ends, and what a worker's end means for the next."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from factories import steady

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.speed.trial_results import Status
from autoprec.errors import DataError, TrialFailure, UserCodeError
from autoprec.workers.client import WorkerSettings
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.runner import RemoteTracer, Runner, run_trial
from autoprec.workers.task_source import TaskSource

MEASURED = steady(0.01)
BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16)


class Scripted:
    """A worker that answers from a list; an exception in it is raised."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers
        self.alive = True
        self.pids = (0,)

    def load(self, on_progress: object = None) -> None: ...

    def call(self, method: str, *, on_progress: object = None, **arguments: Any) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, WorkerFailure):
            self.alive = answer.kind is not FailureKind.KILLED
            raise answer
        return answer

    def kill(self) -> None:
        self.alive = False

    close = kill


class Starts:
    """Starts scripted workers that share one list of answers."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.made: list[Scripted] = []

    def __call__(self, settings: WorkerSettings) -> Any:
        self.made.append(Scripted(self.answers))
        return self.made[-1]


def trial(starts: Starts, recipe: Recipe = Recipe(), *, baseline: bool = False) -> Any:  # noqa: B008
    with Runner(WorkerSettings(TaskSource(Path("x.py"))), None, starts) as runner:
        return run_trial(
            runner, {"batch_size": 32}, recipe, seed=0, budget=TimingBudget(), baseline=baseline
        )


def failure(kind: FailureKind, frames: str = "") -> WorkerFailure:
    return WorkerFailure(kind, "why", frames=frames)


def test_a_measured_trial_is_ok() -> None:
    outcome = trial(Starts(MEASURED))
    assert (outcome.status, outcome.measurement) == (Status.OK, MEASURED)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (FailureKind.OUT_OF_MEMORY, Status.OUT_OF_MEMORY),
        (FailureKind.TIMEOUT, Status.TIMEOUT),
        (FailureKind.SEGFAULT, Status.CRASHED),
        (FailureKind.ILLEGAL_INSTRUCTION, Status.CRASHED),
        (FailureKind.EXITED, Status.CRASHED),
        (FailureKind.UNSUPPORTED, Status.UNSUPPORTED),
        (FailureKind.NONFINITE, Status.UNSUPPORTED),
        (FailureKind.USER_ERROR, Status.UNSUPPORTED),
        (FailureKind.DATA_ERROR, Status.UNSUPPORTED),
        (FailureKind.INTERNAL, Status.UNSUPPORTED),
    ],
)
def test_a_failure_is_an_outcome(kind: FailureKind, status: Status) -> None:
    outcome = trial(Starts(failure(kind)), BFLOAT16)
    assert (outcome.status, outcome.measurement, outcome.reason) == (status, None, "why")


def test_every_kind_is_an_outcome_but_a_lost_device() -> None:
    for kind in FailureKind:
        try:
            outcome = trial(Starts(failure(kind), failure(kind)), BFLOAT16)
        except TrialFailure:
            assert kind is FailureKind.LOST_DEVICE
        else:
            assert outcome.status is not Status.OK


@pytest.mark.parametrize(
    "kind", [FailureKind.USER_ERROR, FailureKind.UNSUPPORTED, FailureKind.NONFINITE]
)
def test_what_the_baseline_cannot_do_is_the_users_error_with_their_frames(
    kind: FailureKind,
) -> None:
    with pytest.raises(UserCodeError) as info:
        trial(Starts(failure(kind, "their frames")), baseline=True)
    assert info.value.frames == "their frames"


def test_what_a_recipe_alone_cannot_do_is_its_result_whatever_the_error() -> None:
    plain_at_another_batch = Recipe(batch_size=64)
    for recipe in (BFLOAT16, Recipe(compile=True), plain_at_another_batch):
        outcome = trial(Starts(failure(FailureKind.USER_ERROR, "their frames")), recipe)
        assert (outcome.status, outcome.reason) == (Status.UNSUPPORTED, "why")


@pytest.mark.parametrize("kind", [FailureKind.DEVICE_FAULT, FailureKind.LOST_DEVICE])
def test_a_device_that_faults_is_tried_once_more_in_a_new_worker(kind: FailureKind) -> None:
    starts = Starts(failure(kind), MEASURED)
    assert trial(starts, BFLOAT16).status is Status.OK
    assert len(starts.made) == 2


def test_a_recipe_under_which_the_device_faults_twice_is_refused() -> None:
    fault = failure(FailureKind.DEVICE_FAULT)
    assert trial(Starts(fault, fault), BFLOAT16).status is Status.CRASHED


def test_a_killed_worker_is_tried_once_more() -> None:
    starts = Starts(failure(FailureKind.KILLED), MEASURED)
    assert trial(starts).status is Status.OK
    assert len(starts.made) == 2


def test_a_trial_that_is_killed_twice_is_killed() -> None:
    killed = failure(FailureKind.KILLED)
    assert trial(Starts(killed, killed)).status is Status.KILLED


@pytest.mark.parametrize(
    "kind", [FailureKind.OUT_OF_MEMORY, FailureKind.UNSUPPORTED, FailureKind.USER_ERROR]
)
def test_a_worker_in_which_something_failed_is_not_used_again(kind: FailureKind) -> None:
    starts = Starts(failure(kind), MEASURED)
    with Runner(WorkerSettings(TaskSource(Path("x.py"))), None, starts) as runner:
        for _ in range(2):
            run_trial(runner, {"batch_size": 32}, BFLOAT16, seed=0, budget=TimingBudget())
    assert len(starts.made) == 2
    assert not starts.made[0].alive


def test_fewer_samples_than_asked_for_is_said() -> None:
    outcome = trial(Starts(MEASURED), Recipe(batch_size=64))
    assert outcome.status is Status.SHORT_DATA
    assert "32 samples where 64" in outcome.reason


@pytest.mark.parametrize("surveyed", [None, 0, 256])
def test_sessions_are_told_how_many_batches_the_description_looked_at(surveyed: int | None) -> None:
    told: list[Any] = []

    class Noting(Scripted):
        def call(self, method: str, *, on_progress: object = None, **arguments: Any) -> Any:
            told.append((method, arguments.get("surveyed")))
            return super().call(method, on_progress=on_progress, **arguments)

    settings = WorkerSettings(TaskSource(Path("x.py")), surveyed=surveyed)
    runner = Runner(settings, None, lambda _: Noting([MEASURED] * 3))
    for method in ("measure", "open", "describe"):
        runner.call(method)
    assert told == [("measure", surveyed), ("open", surveyed), ("describe", None)]


def test_a_tracer_has_the_tracers_methods_and_no_others() -> None:
    with Runner(WorkerSettings(TaskSource(Path("x.py"))), None, Starts("answer")) as runner:
        tracer = RemoteTracer(runner)
        assert tracer.noise(draws=1) == "answer"
        with pytest.raises(AttributeError):
            tracer.open


def test_what_fails_in_float32_ends_the_run_and_what_fails_under_a_recipe_is_told() -> None:
    mine = failure(FailureKind.USER_ERROR, "their frames")
    with Runner(WorkerSettings(TaskSource(Path("x.py"))), None, Starts(mine, mine, mine)) as runner:
        tracer = RemoteTracer(runner)
        for method in ("reference", "noise"):
            with pytest.raises(UserCodeError):
                getattr(tracer, method)()
        with pytest.raises(WorkerFailure):
            tracer.unit_magnitudes()


def test_a_training_in_plain_float32_is_nobodys_recipe() -> None:
    mine = failure(FailureKind.USER_ERROR, "their frames")
    with Runner(WorkerSettings(TaskSource(Path("x.py"))), None, Starts(mine, mine)) as runner:
        tracer = RemoteTracer(runner)
        with pytest.raises(UserCodeError):
            tracer.trajectory(recipe=Recipe(batch_size=8, accumulation_steps=2))
        with pytest.raises(WorkerFailure):
            tracer.trajectory(recipe=Recipe(batch_size=8, memory_format="channels_last"))


def test_what_the_data_raise_ends_the_run_whatever_was_trained_on_them() -> None:
    mine = failure(FailureKind.DATA_ERROR, "their frames")
    with Runner(WorkerSettings(TaskSource(Path("x.py"))), None, Starts(mine, mine, mine)) as runner:
        tracer = RemoteTracer(runner)
        for method in ("reference", "trajectory", "compare_steps"):
            with pytest.raises(DataError) as info:
                getattr(tracer, method)()
            assert info.value.frames == "their frames"


def test_a_task_that_cannot_be_loaded_again_ends_the_run() -> None:
    class Unloadable(Scripted):
        def load(self, on_progress: object = None) -> None:
            raise failure(FailureKind.USER_ERROR, "their frames")

    make = Runner(WorkerSettings(TaskSource(Path("x.py"))), None, lambda _: Unloadable([]))
    with make as runner, pytest.raises(UserCodeError) as info:
        run_trial(runner, {"batch_size": 32}, BFLOAT16, seed=0, budget=TimingBudget())
    assert info.value.frames == "their frames"


# With real workers -------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")
def test_real_workers_are_replaced_after_each_kind_of_end(simulated) -> None:
    ends = {
        "crash_at_batch": Status.CRASHED,
        "exit_at_batch": Status.CRASHED,
        "capacity_bytes": Status.OUT_OF_MEMORY,
    }
    for field, status in ends.items():
        task = simulated(**{field: 64 if field != "capacity_bytes" else 250 * 2**20})
        with Runner(WorkerSettings(TaskSource(task)), None) as runner:
            found = [
                run_trial(
                    runner,
                    {"batch_size": batch},
                    Recipe(batch_size=batch),
                    seed=0,
                    budget=TimingBudget(),
                ).status
                for batch in (32, 64, 32)
            ]
        assert found == [Status.OK, status, Status.OK], field


@pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")
def test_a_worker_that_somebody_kills_between_trials_is_not_missed(simulated) -> None:
    with Runner(WorkerSettings(TaskSource(simulated())), None) as runner:
        for _ in range(3):
            outcome = run_trial(runner, {"batch_size": 32}, Recipe(), seed=0, budget=TimingBudget())
            assert outcome.status is Status.OK
            (pid,) = runner.pids
            os.kill(pid, signal.SIGKILL)


KEEPS = Recipe(knobs={KEEP_MEMORY: True})


@pytest.mark.parametrize(
    ("method", "second", "workers"),
    [
        ("measure", Recipe(), 2),
        ("measure", KEEPS, 1),
        ("open", Recipe(), 2),
        ("compare_steps", BFLOAT16, 1),
    ],
)
def test_a_worker_that_keeps_its_memory_times_nothing_without_that(
    method: str, second: Recipe, workers: int
) -> None:
    """A process cannot take it back. What is not timed does not mind."""
    starts = Starts(*"abc")
    with Runner(WorkerSettings(TaskSource(Path("x.py"))), None, starts) as runner:
        runner.call("measure", recipe=Recipe())
        runner.call("measure", recipe=KEEPS)
        assert len(starts.made) == 1
        runner.call(method, recipe=second)
    assert len(starts.made) == workers
