"""The workers and sessions of recipes that are timed in alternation.

Starting a process costs as much as several rounds, so recipes share a worker where that does not
change their times. Where open sessions would disturb each other, or exceed the memory limit, a
session is opened for its turn, warmed up, and closed again: a worker serves all recipes that keep
freed memory or do not, with as many threads, which no process takes back.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.errors import TaskError
from autoprec.workers.failures import WorkerFailure
from autoprec.workers.runner import RETRIED_FAILURES, Runner, raise_user_error

T = TypeVar("T")


class FinalistFailed(Exception):
    """A finalist that ran before failed during interleaved timing; `recipe` is excluded."""

    def __init__(self, recipe: Recipe, failure: WorkerFailure) -> None:
        super().__init__(str(failure))
        self.recipe, self.failure = recipe, failure


def raise_baseline_failed(failed: FinalistFailed) -> NoReturn:
    """End the tuning where plain float32 ran in the search and fails in alternation."""
    raise_user_error(failed.failure)
    raise TaskError(
        f"the float32 baseline ran before but failed in alternation with others: {failed}"
    ) from failed


#: How long a session is warmed up: one that has many turns, and one that is opened for a single
#: turn. The first steps of a new session fault its memory in: a GPT's at batch 256 ran at 46 to 243
#: samples/s, then at 243. The second session of a worker is faster than its first by up to a fifth.
_TOGETHER_WARMUP_SECONDS, _ALONE_WARMUP_SECONDS = 0.2, 0.5

#: The first step after another worker's turn is slower: that worker's threads spin for some
#: milliseconds before they sleep (OpenMP's wait policy), and the caches are cold. Training pays for
#: neither, but a step as long as a turn would measure nothing else. So such a turn begins with a
#: pause, and with an uncounted step where a step is shorter than this; in a longer one the effect
#: does not show.
_WORKER_SWITCH_PAUSE_SECONDS, LONGEST_WARM_STEP_SECONDS = 0.02, 0.5


class Sessions:
    """The sessions of some recipes, by number; those that may share a worker use that of `shared`.

    They are open `together`, or one at a time. Where the others' workers are kept, they wait beside
    `shared` for the next recipes.
    `start_seconds` and `open_seconds` are what starting the workers and opening the sessions took
    the last time.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        shared: Runner,
        *,
        shares: Callable[[Recipe], bool],
        seed: int,
        together: bool,
        concurrently: bool,
        keeps_processes: bool = False,
    ) -> None:
        self.together = together
        self.start_seconds = self.open_seconds = 0.0
        self._recipes, self._seed, self._concurrently = tuple(recipes), seed, concurrently
        self._warm_step = [math.inf] * len(self._recipes)
        self._open_now: set[int] = set()
        self._restarted: set[int] = set()
        self._shared, self._keeps_processes = shared, keeps_processes and together
        self._own: list[Runner] = []
        self._last: Runner | None = None
        self._runners: list[Runner] = []
        self._used: set[Runner] = set()
        alike: dict[object, Runner] = {}
        for recipe in recipes:
            if together and shares(recipe):
                self._runners.append(shared)
                continue
            setting = recipe.keeps_memory, recipe.knobs.get("threads")
            if together or setting not in alike:
                self._own.append(shared.another(keeps_memory=recipe.keeps_memory))
                alike[setting] = self._own[-1]
            self._runners.append(alike[setting])
        self._used_before = {runner for runner in self._own if runner.pids}

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [pid for runner in {*self._runners} for pid in runner.pids]

    def start(self, indices: Iterable[int]) -> None:
        """Start the workers, a thread each, and open the sessions, where all are open together."""

        def load(runner: Runner) -> None:
            with contextlib.suppress(WorkerFailure):  # opening fails again, and names the recipe
                runner.load()

        began, indices = time.monotonic(), tuple(indices)
        self._each_in_a_thread(load, {self._runners[index] for index in indices})
        self.start_seconds = time.monotonic() - began
        if self.together:
            self._open_sessions(indices)

    def renew_processes(self, indices: Iterable[int]) -> None:
        """Replace every worker, and open the sessions in the new ones."""
        for runner in {*self._runners}:
            runner.drop()
        self._open_now.clear()
        self._used.clear()
        self._last = None
        self.start(indices)

    def end(self, *, failed: bool = False) -> None:
        """End the workers, and leave the shared one, and those that are kept, without sessions."""
        kept = self._own if self._keeps_processes and not failed else []
        with contextlib.suppress(Exception):
            for index in tuple(self._open_now):
                runner = self._runners[index]
                if runner.pids and (runner is self._shared or runner in kept):
                    self.close(index)
        for runner in self._own:
            if runner in kept:
                self._shared.spare.append(runner)
                continue
            with contextlib.suppress(Exception):
                runner.drop()

    def is_shared(self, index: int) -> bool:
        """Say whether other recipes use the same worker, or used it before."""
        runner = self._runners[index]
        return self._runners.count(runner) > 1 or runner in self._used_before

    def switch_to(self, index: int) -> None:
        """Let another worker's threads go to sleep, then warm the caches by one step."""
        if self._runners[index] is not self._last:
            self._last = self._runners[index]
            time.sleep(_WORKER_SWITCH_PAUSE_SECONDS)
            if self._warm_step[index] < LONGEST_WARM_STEP_SECONDS:
                self.time(index, 0.0)

    def open_alone(self, index: int) -> None:
        """Open a session for one turn; a worker's first one, which is slower, is not timed."""
        if self._runners[index] not in self._used:
            self._used.add(self._runners[index])
            self._open(index)
            self.time(index, _ALONE_WARMUP_SECONDS)
            self.close(index)
        self._open(index)
        self.time(index, _ALONE_WARMUP_SECONDS)

    def time(self, index: int, seconds: float) -> Measurement:
        """Time the steps of an open session for so long, one at least."""
        budget = TimingBudget(seconds=seconds, min_steps=1, max_steps=1000, precision=0.0)
        measured: Measurement = self._call(index, "time", budget=budget)
        return measured

    def _open_sessions(self, indices: Iterable[int]) -> None:
        """Open sessions and warm them up; workers open theirs concurrently on a CPU.

        On an accelerator a session limits itself to the free memory, so one is opened after the
        other.
        """
        began = time.monotonic()
        by_runner: dict[Runner | None, list[int]] = {}
        for index in indices:
            runner = self._runners[index] if self._concurrently else None
            by_runner.setdefault(runner, []).append(index)

        def open_all(mates: list[int]) -> None:
            for index in mates:
                self._open(index)

        self._each_in_a_thread(open_all, by_runner.values())
        for index in indices:
            self._warm_step[index] = self.time(index, _TOGETHER_WARMUP_SECONDS).step_seconds
            self._last = self._runners[index]
        self.open_seconds = time.monotonic() - began

    def _each_in_a_thread(self, function: Callable[[T], None], arguments: Collection[T]) -> None:
        with ThreadPoolExecutor(len(arguments)) as pool:
            try:
                list(pool.map(function, arguments))
            except KeyboardInterrupt:
                for runner in self._runners:  # the threads wait for these
                    runner.drop()
                raise

    def _open(self, index: int) -> None:
        self._call(index, "open", recipe=self._recipes[index], seed=self._seed)
        self._open_now.add(index)

    def close(self, index: int) -> None:
        """Close a session."""
        self._call(index, "close")
        self._open_now.discard(index)

    def _call(self, index: int, method: str, **arguments: Any) -> Any:
        try:
            try:
                return self._runners[index].call(method, name=f"final{index}", **arguments)
            except WorkerFailure as failure:
                if failure.kind not in RETRIED_FAILURES or index in self._restarted:
                    raise
                return self._call_in_new_worker(index, method, **arguments)
        except WorkerFailure as failure:
            raise FinalistFailed(self._recipes[index], failure) from failure

    def _call_in_new_worker(self, index: int, method: str, **arguments: Any) -> Any:
        """Retry once in a new worker: a killed worker is no evidence against the recipe."""
        self._restarted.add(index)
        runner = self._runners[index]
        for mate in sorted(self._open_now):
            if self._runners[mate] is runner:
                recipe = self._recipes[mate]
                runner.call("open", name=f"final{mate}", recipe=recipe, seed=self._seed)
        return runner.call(method, name=f"final{index}", **arguments)
