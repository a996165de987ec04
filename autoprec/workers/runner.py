"""Runs trials in a worker that is replaced when a trial kills it, and reports how each ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoprec.backends.protocol import ProgressCallback
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import Point
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.errors import DataError, TaskError, TrialFailure, UserCodeError
from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.handlers import TRACER_METHODS, LoadedTask
from autoprec.workers.rank_group import RankGroup, start_workers

_STATUS_OF = {
    FailureKind.OUT_OF_MEMORY: Status.OUT_OF_MEMORY,
    FailureKind.KILLED: Status.KILLED,
    FailureKind.TIMEOUT: Status.TIMEOUT,
    FailureKind.SEGFAULT: Status.CRASHED,
    FailureKind.ILLEGAL_INSTRUCTION: Status.CRASHED,
    FailureKind.EXITED: Status.CRASHED,
    FailureKind.DEVICE_FAULT: Status.CRASHED,
    FailureKind.LOST_PEER: Status.CRASHED,
    FailureKind.UNSUPPORTED: Status.UNSUPPORTED,
    FailureKind.NONFINITE: Status.UNSUPPORTED,
    FailureKind.USER_ERROR: Status.UNSUPPORTED,
    FailureKind.DATA_ERROR: Status.UNSUPPORTED,
    FailureKind.INTERNAL: Status.UNSUPPORTED,
}

#: Failures that the machine or another process may have caused: retried once in a new worker.
RETRIED_FAILURES = (
    FailureKind.KILLED,
    FailureKind.DEVICE_FAULT,
    FailureKind.LOST_DEVICE,
    FailureKind.LOST_PEER,
)

#: Methods of the service that open a session to time it.
_TIMING_METHODS = ("measure", "open", "operator_times", "rounding_gain")


class Runner:
    """Holds one worker for the trials of one task, and starts another when it is lost.

    The seconds that the user's script took to its training are added to `start_ups`. The runners in
    `spare` wait for recipes that may not share this one's worker.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        on_progress: ProgressCallback | None,
        start: Callable[[WorkerSettings], Worker | RankGroup] = start_workers,
        start_ups: list[float] | None = None,
    ) -> None:
        self.settings = settings
        self._progress = on_progress
        self._start = start
        self._worker: Worker | RankGroup | None = None
        self._keeps_memory = False
        self._start_ups = start_ups
        self.spare: list[Runner] = []

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.drop_spare()
        if self._worker is not None:
            if error is None:
                self._worker.close()
            else:
                self._worker.kill()
            self._worker = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the worker's process ids, one for each rank; none without a worker."""
        return () if self._worker is None else self._worker.pids

    def another(self, *, keeps_memory: bool) -> Runner:
        """Return a spare runner, or a new one, for a recipe that keeps freed memory or does not."""
        fit = [each for each in self.spare if keeps_memory or not each._keeps_memory]
        if not fit:
            return Runner(self.settings, self._progress, self._start, self._start_ups)
        best = next((each for each in fit if each._keeps_memory is keeps_memory), fit[0])
        self.spare.remove(best)
        return best

    def drop_spare(self) -> None:
        """End the workers of the runners that wait."""
        while self.spare:
            self.spare.pop().drop()

    def load(self) -> LoadedTask:
        """Load the task in the worker, starting one if there is none.

        No recipe has a part in loading: a fault of the task there ends the run.
        """
        new = False
        if self._worker is None or not self._worker.alive:
            self.drop()
            self._worker, new = self._start(self.settings), True
        try:
            loaded = self._worker.load(self._progress)
        except WorkerFailure as failure:
            raise_user_error(failure)
            raise
        if new and self._start_ups is not None:
            self._start_ups.append(loaded.start_seconds)
        return loaded

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the worker's service; a worker in which something failed is dropped.

        What failed may have left memory behind, or a device context that is lost. A worker that
        keeps freed memory is dropped, too, before a recipe is timed that does not keep it.
        """
        recipe = arguments.get("recipe")
        keeps = isinstance(recipe, Recipe) and recipe.keeps_memory
        if self._keeps_memory and method in _TIMING_METHODS and not keeps:
            self.drop()
        if method in _TIMING_METHODS and self.settings.surveyed is not None:
            arguments["surveyed"] = self.settings.surveyed
        try:
            self.load()
            self._keeps_memory = self._keeps_memory or keeps
            assert self._worker is not None
            return self._worker.call(method, on_progress=self._progress, **arguments)
        except WorkerFailure:
            self.drop()
            raise

    def drop(self) -> None:
        """End the worker; the next call starts another."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
        self._keeps_memory = False


def raise_user_error(failure: WorkerFailure) -> None:
    """Raise the error that ends the run where a failure is the user's, the device's or our own."""
    raise_unrelated(failure)
    if failure.kind is FailureKind.USER_ERROR:
        if failure.frames:
            raise UserCodeError(failure.message, failure.frames) from failure
        raise TaskError(failure.message) from failure
    if failure.kind is FailureKind.INTERNAL:
        raise TrialFailure(failure.message) from failure


def raise_unrelated(failure: WorkerFailure) -> None:
    """End the run if the recipe has no part in a failure: the data's, or the device is lost."""
    if failure.kind is FailureKind.DATA_ERROR:
        raise DataError(failure.message, failure.frames) from failure
    raise_device_lost(failure)


def raise_device_lost(failure: WorkerFailure) -> None:
    """End the run if the device is lost: no recipe can be measured on it."""
    if failure.kind is FailureKind.LOST_DEVICE:
        raise TrialFailure(
            f"the device was lost: {failure.message}. Check it with the vendor's tool and run the "
            "same command again; finished trials are kept"
        ) from failure


def run_trial(
    runner: Runner,
    point: Point,
    recipe: Recipe,
    *,
    seed: int,
    budget: TimingBudget,
    baseline: bool = False,
) -> Outcome:
    """Measure one recipe; a failure is an outcome, for the baseline has shown that the task runs.

    A failure of the `baseline` itself is the user's, and raises. A killed worker says nothing about
    the recipe, and a device fault little: those are retried once.
    """
    try:
        try:
            measured: Measurement = runner.call("measure", recipe=recipe, seed=seed, budget=budget)
        except WorkerFailure as failure:
            if failure.kind not in RETRIED_FAILURES:
                raise
            measured = runner.call("measure", recipe=recipe, seed=seed, budget=budget)
    except WorkerFailure as failure:
        if baseline:
            raise_user_error(failure)
            if _STATUS_OF[failure.kind] is Status.UNSUPPORTED:
                raise UserCodeError(failure.message, failure.frames) from failure
        raise_device_lost(failure)
        return Outcome(point, _STATUS_OF[failure.kind], reason=failure.message[:500])
    if measured.samples_per_step < recipe.effective_batch:
        counted = measured.samples_per_step / (recipe.accumulation_steps * recipe.world_size)
        return Outcome(
            point,
            Status.SHORT_DATA,
            measured,
            f"the data gave {counted:g} samples where {recipe.batch_size} were requested",
        )
    return Outcome(point, Status.OK, measured)


class RemoteTracer:
    """The Tracer Protocol, answered by a worker."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in TRACER_METHODS:
            raise AttributeError(name)

        def call(**arguments: Any) -> Any:
            try:
                return self._runner.call(name, **arguments)
            except WorkerFailure as failure:
                in_float32 = name in _FLOAT32_METHODS or _in_float32(arguments.get("recipe"))
                if in_float32 and failure.kind not in RETRIED_FAILURES:
                    raise_user_error(failure)
                if failure.kind is FailureKind.DATA_ERROR:
                    raise_unrelated(failure)
                raise

        return call


#: Methods that train in float32 only, so that no recipe can be the cause of a failure.
_FLOAT32_METHODS = ("reference", "noise")


def _in_float32(recipe: Recipe | None) -> bool:
    """Return whether a recipe is the user's own float32, whatever its batch and ranks."""
    return recipe is not None and recipe == recipe.in_float32()
