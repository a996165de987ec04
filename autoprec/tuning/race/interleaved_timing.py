"""Interleaved timing: finalists take turns in rounds, each with a session of its own.

Machines drift by more than the differences that matter, so recipes are compared only within rounds
that all of them ran. Every second round runs in reverse order (A B C, C B A).

A machine's speed changes within seconds by more than its processes differ. So the recipes' sessions
are open at the same time, and take many short turns. Where one's memory would change another's
speed, each has a worker of its own. On a CPU every round has new processes: a recipe's rate in a
round is that of a process, rounds are independent of each other, and an interval over them holds in
the next process. How many rounds run, the caller decides, by `core.speed.rounds`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autoprec.backends import registry
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.rounds import level_turns, turns_are_enough, turns_worth
from autoprec.core.speed.selection import Finalist, finalist_of
from autoprec.core.statistics import median
from autoprec.tuning.events import Listener, Round
from autoprec.tuning.job import TuningJob
from autoprec.tuning.race.sessions import Sessions
from autoprec.tuning.time_limit import CONFIRMATION_SHARE
from autoprec.tuning.trials import Measured
from autoprec.workers.cpu_contention import ContentionMonitor
from autoprec.workers.runner import Runner

SelectRemaining = Callable[[tuple[Finalist, ...]], Collection[int]]
"""Returns the indices of the finalists that run another round; none: the rounds are enough."""


def keep_all(finals: tuple[Finalist, ...]) -> Collection[int]:
    """Let every finalist run the next round, whatever the rounds so far say."""
    return range(len(finals))


def shares_worker(job: TuningJob, recipe: Recipe, framework: str) -> bool:
    """Say whether sessions of other recipes may be open in the recipe's process.

    Threads and TF32 are set for the whole process. Where sessions interfere, what is compiled is
    thrown away when another one opens; and what another session frees changes the speed of one that
    gives main memory back, and hardly that of one that keeps it: beside float32, three recipes on a
    Xeon with AMX were faster by 3.1, 18.4 and 4.3 per cent, and by -0.9, 2.5 and -2.9
    (benchmarks/search/session_pairs.py).
    """
    if "threads" in recipe.knobs or recipe.policy is Policy.TF32:
        return False
    if not registry.capabilities(framework).sessions_interfere:
        return True
    return not recipe.compile and (recipe.keeps_memory or not job.on_cpu)


class InterleavedTiming:
    """Finalists ready to run in rounds; those that may share a worker use the one of `shared`.

    `round_seconds` is what another round will take, by the last one, its processes included.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        shared: Runner,
        *,
        shares: Callable[[Recipe], bool],
        seed: int,
        together: bool,
        listener: Listener,
        contention_monitor: ContentionMonitor,
        concurrently: bool = True,
        new_processes: bool = False,
        keeps_processes: bool = False,
    ) -> None:
        self.recipes = tuple(recipes)
        self.measured: list[list[Measurement]] = [[] for _ in recipes]
        self.round_seconds = 0.0
        self._new_processes, self._listener = new_processes, listener
        self._keeps_processes = keeps_processes
        self._contention_monitor = contention_monitor
        self._turns: list[list[float]] = [[] for _ in recipes]
        self._sessions = Sessions(
            recipes,
            shared,
            shares=shares,
            seed=seed,
            together=together,
            concurrently=concurrently,
            keeps_processes=keeps_processes,
        )

    def __enter__(self) -> InterleavedTiming:
        try:
            self._sessions.start(range(len(self.recipes)))
        except BaseException:
            self._sessions.end(failed=True)
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._sessions.end(failed=error is not None)

    def run(self, rounds: int, running: SelectRemaining = keep_all) -> tuple[Finalist, ...]:
        """Run up to `rounds` rounds; return every finalist with its rates, in samples a second.

        After each round `running` selects who runs the next; a finalist dropped has fewer rates.
        """
        order = list(range(len(self.recipes)))
        renews = self._new_processes and not self._keeps_processes
        for number in range(rounds):
            if number and renews:
                self._sessions.renew_processes(order)
            began = time.monotonic()
            for index, measured in self._time_round(order, backwards=number % 2 == 1).items():
                self.measured[index].append(measured)
            rates = [0.0] * len(self.recipes)
            for index in order:
                rates[index] = self.measured[index][-1].samples_per_second
            ready = self._sessions.start_seconds + self._sessions.open_seconds
            self.round_seconds = time.monotonic() - began + (ready if renews else 0.0)
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
        """Time each recipe once, or as often as new processes are worth, there and back.

        Turns end before that where they tell enough.
        """
        turns: dict[int, list[Measurement]] = {index: [] for index in order}
        began, count = time.monotonic(), 1
        while (ran := len(turns[order[0]])) < count and not turns_are_enough(_logs(turns)):
            for index in reversed(order) if backwards is (ran % 2 == 0) else order:
                turns[index].append(self._time_turn(index))
            if not ran and self._new_processes:
                each = max(time.monotonic() - began, 1e-3)
                ready = self._sessions.start_seconds + self._sessions.open_seconds
                count = turns_worth(ready, each)
        return _level(turns)

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


def _level(turns: Mapping[int, Sequence[Measurement]]) -> Mapping[int, Measurement]:
    """Return every recipe's turns of one round as one."""
    if all(len(own) == 1 for own in turns.values()):
        return {i: own[0] for i, own in turns.items()}
    levels, _ = level_turns(_logs(turns))
    levelled = {}
    for (i, own), log in zip(turns.items(), levels, strict=True):
        nearest = min(own, key=lambda turn: abs(math.log(turn.step_seconds) - log))
        peak = max(turn.peak_memory_bytes for turn in own)
        levelled[i] = replace(nearest, step_seconds=math.exp(log), peak_memory_bytes=peak)
    return levelled


def _logs(turns: Mapping[int, Sequence[Measurement]]) -> list[list[float]]:
    return [[math.log(turn.step_seconds) for turn in own] for own in turns.values()]


#: Memory of a process of its own, besides its tensors: some 500 MiB, on a CPU as on CUDA.
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
    needed = sum(
        trials.peak_memory_of(recipe)
        + (0 if shares_worker(job, recipe, trials.framework) else _CONTEXT_BYTES)
        for recipe in recipes
    )
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
    *,
    until: float = CONFIRMATION_SHARE,
    new_processes: bool = True,
) -> TimedRounds:
    """Time recipes in alternation; raise `FinalistFailed` where one of them fails.

    No round begins that would not end before the share `until` of the time limit has passed.
    Recipes that may share a worker use `runner`, and release their memory there at the end. The
    others get runners of their own. `trials` tell how much memory each recipe needs. On a CPU each
    round has `new_processes`, unless only the order of recipes matters: what a process adds to the
    times of all that run in it does not change that. Where each would run the user's script anew,
    rounds as long keep their processes, and what is timed afterwards uses them, too.
    """
    together, keeps_processes = fit_in_memory_together(job, recipes, trials), not job.task.plain

    def shares(recipe: Recipe) -> bool:
        return shares_worker(job, recipe, trials.framework)

    interfere = registry.capabilities(trials.framework).sessions_interfere and job.on_cpu
    if not together:
        runner.drop_spare()
    if not (together and any(map(shares, recipes))) or (interfere and not runner.spare):
        runner.drop()  # its memory is free for the recipes that run, or it starts anew
    timing = InterleavedTiming(
        recipes,
        runner,
        shares=shares,
        seed=job.options.seed,
        together=together,
        listener=job.listener,
        contention_monitor=job.contention_monitor,
        concurrently=job.on_cpu,
        new_processes=new_processes and job.on_cpu,
        keeps_processes=keeps_processes,
    )

    def in_time(finalists: tuple[Finalist, ...]) -> Collection[int]:
        late = timing.round_seconds >= job.deadline.left(until)
        return () if late else running(finalists)

    with timing:
        finalists = timing.run(rounds, in_time)
    measured = zip(recipes, timing.measured, strict=True)
    return TimedRounds(finalists, {recipe.key(): tuple(rounds) for recipe, rounds in measured})
