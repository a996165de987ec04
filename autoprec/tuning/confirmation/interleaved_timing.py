"""Interleaved timing: finalists take turns in rounds, each with a session of its own.

Machines drift by more than the differences that matter, so recipes are compared only within rounds
that all of them ran. Every second round runs in reverse order (A B C, C B A).

On a CPU a recipe's speed also depends on where its process and its session happen to lie in memory.
No number of steps in one session shows that, so there each turn has a session of its own, and each
round new processes. A recipe's rate in a round is that of a process: rounds are independent of each
other, and an interval over them holds in the next process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autoprec.backends import registry
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.selection import Finalist, finalist_of
from autoprec.core.statistics import median
from autoprec.tuning.confirmation.sessions import Sessions
from autoprec.tuning.events import Listener, Round
from autoprec.tuning.job import TuningJob
from autoprec.tuning.search.trials import Measured
from autoprec.workers.cpu_contention import ContentionMonitor
from autoprec.workers.runner import Runner

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
        new_processes: bool = False,
    ) -> None:
        self.recipes = tuple(recipes)
        self.measured: list[list[Measurement]] = [[] for _ in recipes]
        self._new_processes, self._listener = new_processes, listener
        self._contention_monitor = contention_monitor
        self._turns: list[list[float]] = [[] for _ in recipes]
        self._sessions = Sessions(
            recipes,
            shared,
            make_runner,
            shares=shares,
            seed=seed,
            together=together,
            concurrently=concurrently,
        )

    def __enter__(self) -> InterleavedTiming:
        try:
            self._sessions.start(range(len(self.recipes)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._sessions.end()

    def run(self, rounds: int, running: SelectRemaining = keep_all) -> tuple[Finalist, ...]:
        """Run up to `rounds` rounds; return every finalist with its rates, in samples a second.

        After each round `running` selects who runs the next; a finalist dropped has fewer rates.
        """
        order = list(range(len(self.recipes)))
        for number in range(rounds):
            if number and self._new_processes:
                self._sessions.renew_processes(order)
            for index, measured in self._time_round(order, backwards=number % 2 == 1).items():
                self.measured[index].append(measured)
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

    def _time_round(self, order: Sequence[int], *, backwards: bool) -> Mapping[int, Measurement]:
        """Time each recipe once, or as often as new processes are worth; every other time in turn.

        The number of turns that tells most for its seconds is the square root of what the processes
        take over what sessions and turns do, times how much more sessions differ (Kalibera and
        Jones, "Rigorous benchmarking in reasonable time", 2013).
        """
        turns: dict[int, list[Measurement]] = {index: [] for index in order}
        began, count = time.monotonic(), 1
        while (ran := len(turns[order[0]])) < count:
            if ran:
                self._sessions.renew_sessions(order)
            for index in reversed(order) if backwards is (ran % 2 == 0) else order:
                turns[index].append(self._time_turn(index))
            if not ran and self._new_processes and self._sessions.together:
                each = max(time.monotonic() - began + self._sessions.open_seconds, 1e-3)
                worth = SPEED.sessions_over_processes * math.sqrt(
                    self._sessions.start_seconds / each
                )
                count = max(1, min(SPEED.most_turns, round(worth)))
        return {index: _typical(own) for index, own in turns.items()}

    def _time_turn(self, index: int) -> Measurement:
        """Time a few steps; report no memory peak of a worker that other recipes share."""
        sessions = self._sessions
        if sessions.together:
            sessions.switch_to(index)
            measured = self._time_in_line(index)
            return replace(measured, peak_memory_bytes=0) if sessions.is_shared(index) else measured
        sessions.open_alone(index)
        measured = self._time_in_line(index)
        sessions.close(index)
        return measured

    def _time_in_line(self, index: int) -> Measurement:
        """Time a turn, once more where it is far from the recipe's turns so far."""
        measured, before = self._time_in_a_pause(index), self._turns[index]
        if before:
            ratio = measured.step_seconds / median(before)
            if max(ratio, 1 / ratio) > SPEED.out_of_line_factor:
                measured = self._time_in_a_pause(index)
        before.append(measured.step_seconds)
        return measured

    def _time_in_a_pause(self, index: int) -> Measurement:
        """Time a turn while no other process uses the processors, as far as patience lasts."""
        return self._contention_monitor.undisturbed(
            lambda: self._sessions.time(index, SPEED.turn_seconds), lambda: self._sessions.pids
        )


def _typical(turns: Sequence[Measurement]) -> Measurement:
    """Return the turns of a recipe in one round as one: the median of their step times."""
    seconds = median([turn.step_seconds for turn in turns])
    nearest = min(turns, key=lambda turn: abs(turn.step_seconds - seconds))
    peak = max(turn.peak_memory_bytes for turn in turns)
    return replace(nearest, step_seconds=seconds, peak_memory_bytes=peak)


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
) -> TimedRounds:
    """Time recipes in alternation; raise `FinalistFailed` where one of them fails.

    Recipes that may share a worker use `runner`, and release their memory there at the end. The
    others get runners of their own. `trials` tell how much memory each recipe needs.
    """

    def shares(recipe: Recipe) -> bool:
        return job.on_cpu and may_share_worker(recipe, trials.framework)

    if not any(map(shares, recipes)):
        runner.drop()  # frees its memory for the recipes that run
    timing = InterleavedTiming(
        recipes,
        runner,
        job.runner,
        shares=shares,
        seed=job.options.seed,
        together=fit_in_memory_together(job, recipes, trials),
        listener=job.listener,
        contention_monitor=job.contention_monitor,
        concurrently=job.on_cpu,
        new_processes=job.on_cpu,
    )
    with timing:
        finalists = timing.run(rounds, running)
    measured = zip(recipes, timing.measured, strict=True)
    return TimedRounds(finalists, {recipe.key(): tuple(rounds) for recipe, rounds in measured})
