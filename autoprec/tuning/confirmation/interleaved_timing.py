"""Interleaved timing: finalists take turns in rounds, each with a session of its own.

Machines drift by more than the differences that matter, so recipes are compared only within rounds
that all of them ran. Every second round runs in reverse order (A B C, C B A). Starting a process
costs as much as several rounds, so recipes share a worker where that does not change their times.
Where the finalists together exceed the memory limit, each session is opened for its turn, warmed
up, and closed again.

On a CPU a session's speed also depends on where its memory happens to lie. No number of rounds in
one session shows that, so sessions are renewed between rounds, and workers as often as time allows.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from autoprec.backends import registry
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.best_arm import TURN_SECONDS
from autoprec.core.speed.selection import Finalist, finalist_of
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.tuning.events import Listener, Round
from autoprec.tuning.job import TuningJob
from autoprec.tuning.search.trials import Measured
from autoprec.workers.cpu_contention import ContentionMonitor
from autoprec.workers.failures import WorkerFailure
from autoprec.workers.runner import RETRIED_FAILURES, Runner

T = TypeVar("T")


class FinalistFailed(Exception):
    """A finalist that ran before failed during interleaved timing; `recipe` is excluded."""

    def __init__(self, recipe: Recipe, failure: WorkerFailure) -> None:
        super().__init__(str(failure))
        self.recipe, self.failure = recipe, failure


#: How long a session is warmed up, in a shared worker and in one of its own. The first steps of a
#: new session fault its memory in: a GPT's at batch 256 ran at 46 to 243 samples/s, then at 243.
_SHARED_WORKER_WARMUP_SECONDS, _OWN_WORKER_WARMUP_SECONDS = 0.1, 0.5

#: A turn this much slower than the recipe's fastest so far is disturbed, for example while memory
#: that other sessions freed comes back from the system page by page. (The search's own times do not
#: count as the fastest: a recipe that was lucky there would be retried more often, and so be lucky
#: again.) A disturbed turn is repeated within a retry budget per round: a speed not reached by then
#: is not reachable next to the others, or the whole machine has slowed down, and the slower time
#: becomes the recipe's own. A recipe that has used up its whole budget simply varies that much.
_DISTURBED_RATIO, _ROUND_RETRY_SECONDS, _RETRY_BUDGET_SECONDS = 1.15, 0.5, 1.0

#: The first step after another worker's turn is slower: that worker's threads spin for some
#: milliseconds before they sleep (OpenMP's wait policy), and the caches are cold. Training pays for
#: neither, but a step as long as a turn would measure nothing else. So such a turn begins with a
#: pause, and with an uncounted step where a step is shorter than this; in a longer one the effect
#: does not show.
_WORKER_SWITCH_PAUSE_SECONDS, _LONGEST_WARM_STEP_SECONDS = 0.02, 0.5

#: What new sessions and workers may take on a CPU: seconds a round; what is not spent is saved up.
#: Sessions of one recipe (an MLP at batch 32) that each varied by a few per cent differed from each
#: other by 14 % (standard deviation), half of it between sessions of a process, half between
#: processes. A new session takes 0.3 s in PyTorch, a new worker 5 s.
_RENEWAL_SECONDS = 2.0

SelectRemaining = Callable[[tuple[Finalist, ...]], Collection[int]]
"""Returns the indices of the finalists that run another round; none: the rounds are enough."""


def keep_all(finals: tuple[Finalist, ...]) -> Collection[int]:
    """Let every finalist run the next round, whatever the rounds so far say."""
    return range(len(finals))


#: Knobs that a framework sets for the whole process.
_PROCESS_WIDE_KNOBS = ("threads", "implicit_bfloat16", "cudnn_benchmark")


def may_share_worker(recipe: Recipe, framework: str) -> bool:
    """Say whether a recipe's times on a CPU are unaffected by other sessions in its process.

    See `Capabilities.sessions_interfere`.
    """
    wide = any(name in recipe.knobs for name in _PROCESS_WIDE_KNOBS)
    if registry.capabilities(framework).sessions_interfere:
        return recipe.keeps_memory and not recipe.compile and not wide
    return not wide


class InterleavedTiming:
    """Finalists ready to run in rounds; those that may share a worker use the one of `shared`."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        shared: Runner,
        make_runner: Callable[[], Runner],
        *,
        shares: Callable[[Recipe], bool],
        seed: int,
        together: bool,
        listener: Listener,
        contention_monitor: ContentionMonitor,
        concurrently: bool = True,
        renewal_seconds: float = 0.0,
    ) -> None:
        self.recipes = tuple(recipes)
        self._renewal_seconds = renewal_seconds if together else 0.0
        self._saved_seconds = self._start_seconds = self._open_seconds = 0.0
        self._fastest = [math.inf] * len(self.recipes)
        self.measured: list[list[Measurement]] = [[] for _ in recipes]
        self._retried_seconds = 0.0
        self._retry_budget = [_RETRY_BUDGET_SECONDS] * len(self.recipes)
        self._seed, self._together, self._listener = seed, together, listener
        self._concurrently = concurrently
        self._contention_monitor = contention_monitor
        self._open_now: set[int] = set()
        self._restarted: set[int] = set()
        self._shared = shared
        self._own: list[Runner] = []
        self._last: Runner | None = None
        self._runners: list[Runner] = []
        for recipe in recipes:
            if not shares(recipe) and (together or not self._own):
                self._own.append(make_runner())
            self._runners.append(shared if shares(recipe) else self._own[-1])

    def __enter__(self) -> InterleavedTiming:
        if self._together:
            try:
                self._open_together()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(Exception):
            for index in tuple(self._open_now):
                if self._runners[index] is self._shared and self._shared.pids:
                    self._close(index)
        for runner in self._own:
            with contextlib.suppress(Exception):
                runner.drop()

    def _open_together(self) -> None:
        """Start the workers and open every session, and note how long each took."""
        indices = range(len(self.recipes))
        began = time.monotonic()
        self._start_workers(indices)
        started = time.monotonic()
        self._open_sessions(indices)
        self._start_seconds = started - began
        self._open_seconds = time.monotonic() - started

    def _renew(self, indices: Sequence[int]) -> None:
        """Replace the workers or, where no time is saved up for that, the sessions."""
        self._saved_seconds += self._renewal_seconds
        in_new_workers = self._saved_seconds >= self._start_seconds + self._open_seconds
        if not in_new_workers and self._saved_seconds < self._open_seconds:
            return
        began = time.monotonic()
        for index in tuple(self._open_now):
            self._close(index)
        if in_new_workers:
            for index in indices:
                self._runners[index].drop()
            self._start_workers(indices)
        opening = time.monotonic()
        self._open_sessions(indices)
        now = time.monotonic()
        self._saved_seconds -= now - began
        if in_new_workers:
            self._start_seconds = opening - began  # at first, some ran already
        else:  # the first session of a worker takes longer
            self._open_seconds = now - opening

    def _start_workers(self, indices: Iterable[int]) -> None:
        def start(runner: Runner) -> None:
            with contextlib.suppress(WorkerFailure):  # opening fails again, and names the recipe
                runner.load()

        self._each_in_a_thread(start, {self._runners[index] for index in indices})

    def _open_sessions(self, indices: Iterable[int]) -> None:
        """Open sessions and warm them up; workers open theirs concurrently on a CPU.

        On an accelerator a session limits itself to the free memory, so one is opened after the
        other.
        """
        by_runner: dict[Runner | None, list[int]] = {}
        for index in indices:
            runner = self._runners[index] if self._concurrently else None
            by_runner.setdefault(runner, []).append(index)

        def open_all(mates: list[int]) -> None:
            for index in mates:
                self._open(index)

        self._each_in_a_thread(open_all, by_runner.values())
        for index in indices:
            own = self._runners[index] is not self._shared
            warm = self._time(
                index, _OWN_WORKER_WARMUP_SECONDS if own else _SHARED_WORKER_WARMUP_SECONDS
            )
            self._fastest[index] = warm.step_seconds
            self._last = self._runners[index]

    def _each_in_a_thread(self, function: Callable[[T], None], arguments: Collection[T]) -> None:
        with ThreadPoolExecutor(len(arguments)) as pool:
            try:
                list(pool.map(function, arguments))
            except KeyboardInterrupt:
                for runner in self._runners:  # the threads wait for these
                    runner.drop()
                raise

    def _open(self, index: int) -> None:
        self._call(index, "open", recipe=self.recipes[index], seed=self._seed)
        self._open_now.add(index)

    def _close(self, index: int) -> None:
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
            raise FinalistFailed(self.recipes[index], failure) from failure

    def _call_in_new_worker(self, index: int, method: str, **arguments: Any) -> Any:
        """Retry once in a new worker: a killed worker is no evidence against the recipe."""
        self._restarted.add(index)
        runner = self._runners[index]
        for mate in sorted(self._open_now):
            if self._runners[mate] is runner:
                recipe = self.recipes[mate]
                runner.call("open", name=f"final{mate}", recipe=recipe, seed=self._seed)
        return runner.call(method, name=f"final{index}", **arguments)

    def run(self, rounds: int, running: SelectRemaining = keep_all) -> tuple[Finalist, ...]:
        """Run up to `rounds` rounds; return every finalist with its rates, in samples a second.

        After each round `running` selects who runs the next; a finalist dropped has fewer rates.
        """
        order = list(range(len(self.recipes)))
        for number in range(rounds):
            if number and self._renewal_seconds:
                self._renew(order)
            self._retried_seconds = 0.0
            for index in order if number % 2 == 0 else reversed(order):
                self.measured[index].append(self._time_turn(index))
            rates = [0.0] * len(self.recipes)
            for index in order:
                rates[index] = self.measured[index][-1].samples_per_second
            self._listener(Round(number + 1, rounds, tuple(rates)))
            order = sorted(running(self._finalists()))
            if not order:
                break
        return self._finalists()

    def _finalists(self) -> tuple[Finalist, ...]:
        return tuple(
            finalist_of(recipe, measured)
            for recipe, measured in zip(self.recipes, self.measured, strict=True)
        )

    def _worker_pids(self) -> list[int]:
        return [pid for runner in {*self._runners} for pid in runner.pids]

    def _time_turn(self, index: int) -> Measurement:
        """Time a few steps; report no memory peak of a worker that other recipes share."""
        if self._together:
            measured = self._time_until_undisturbed(index)
            shared = self._runners.count(self._runners[index]) > 1
            return replace(measured, peak_memory_bytes=0) if shared else measured
        self._open(index)
        self._time(index, _OWN_WORKER_WARMUP_SECONDS)
        measured = self._time_in_a_pause(index)
        self._close(index)
        return measured

    def _time_until_undisturbed(self, index: int) -> Measurement:
        """Time a turn, repeated within the retry budget while the recipe is disturbed."""
        if self._runners[index] is not self._last:
            self._last = self._runners[index]
            self._warm_caches(index)
        while True:
            measured = self._time_in_a_pause(index)
            slow = measured.step_seconds > _DISTURBED_RATIO * self._fastest[index]
            if not slow or self._retry_budget[index] <= 0:
                self._fastest[index] = min(self._fastest[index], measured.step_seconds)
                return measured
            seconds = max(TURN_SECONDS, measured.steps * measured.step_seconds)
            self._retried_seconds += seconds
            self._retry_budget[index] -= seconds
            if self._retried_seconds >= _ROUND_RETRY_SECONDS:
                self._fastest[index] = measured.step_seconds
                return measured

    def _warm_caches(self, index: int) -> None:
        """Let the previous worker's threads go to sleep, then warm the caches by one step."""
        time.sleep(_WORKER_SWITCH_PAUSE_SECONDS)
        if self._fastest[index] < _LONGEST_WARM_STEP_SECONDS:
            self._time(index, 0.0)

    def _time_in_a_pause(self, index: int) -> Measurement:
        """Time a turn while no other process uses the processors, as far as patience lasts."""
        return self._contention_monitor.undisturbed(
            lambda: self._time(index, TURN_SECONDS), self._worker_pids
        )

    def _time(self, index: int, seconds: float) -> Measurement:
        budget = TimingBudget(seconds=seconds, min_steps=1, max_steps=1000, precision=0.0)
        measured: Measurement = self._call(index, "time", budget=budget)
        return measured


#: Accelerator memory of a process's own context, besides its tensors: some 500 MiB on CUDA.
_CONTEXT_BYTES = 512 * 2**20


class KnownMemory(Protocol):
    """What is known of recipes before they are timed: their framework and peak memory."""

    @property
    def framework(self) -> str:
        """Return the name of the task's framework."""

    def peak_memory_of(self, recipe: Recipe) -> int:
        """Return a recipe's peak memory in bytes."""


def fit_in_memory_together(job: TuningJob, recipes: Sequence[Recipe], trials: KnownMemory) -> bool:
    """Say whether the memory limit allows sessions of all these recipes at once."""
    context = 0 if job.on_cpu else _CONTEXT_BYTES
    needed = sum(trials.peak_memory_of(recipe) + context for recipe in recipes)
    return job.memory_bytes is None or needed <= job.memory_bytes


@dataclass(frozen=True)
class TimedRounds:
    """The finalists with their rates, and the measurements of each recipe, one a round."""

    finalists: tuple[Finalist, ...]
    measured: Measured


def time_interleaved(
    job: TuningJob,
    recipes: Sequence[Recipe],
    rounds: int,
    trials: KnownMemory,
    runner: Runner,
    running: SelectRemaining = keep_all,
    make_runner: Callable[[], Runner] | None = None,
) -> TimedRounds:
    """Time recipes in alternation; raise `FinalistFailed` where one of them fails.

    Recipes that may share a worker use `runner`, and release their memory there at the end. The
    others get runners from `make_runner` (default: the job's). `trials` tell how much memory each
    recipe needs.
    """

    def shares(recipe: Recipe) -> bool:
        return job.on_cpu and may_share_worker(recipe, trials.framework)

    if not any(map(shares, recipes)):
        runner.drop()  # frees its memory for the recipes that run
    timing = InterleavedTiming(
        recipes,
        runner,
        make_runner or job.runner,
        shares=shares,
        seed=job.options.seed,
        together=fit_in_memory_together(job, recipes, trials),
        listener=job.listener,
        contention_monitor=job.contention_monitor,
        concurrently=job.on_cpu,
        renewal_seconds=_RENEWAL_SECONDS if job.on_cpu else 0.0,
    )
    with timing:
        finalists = timing.run(rounds, running)
    measured = zip(recipes, timing.measured, strict=True)
    return TimedRounds(finalists, {recipe.key(): tuple(rounds) for recipe, rounds in measured})
