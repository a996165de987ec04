"""Stand-ins for workers whose sessions take turns, and a contest of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from factories import no_contention, steady

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.tuning.events import silent
from autoprec.tuning.race.interleaved_timing import InterleavedTiming
from autoprec.workers.client import WorkerSettings
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.runner import Runner
from autoprec.workers.task_source import TaskSource

KEPT = {KEEP_MEMORY: True}
PLAIN = Recipe(batch_size=32)
FAST = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=64, knobs=KEPT)
LARGE = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=128, knobs=KEPT)


class Worker:
    """Keeps sessions by name, as a real one does, and dies when it is told to."""

    killed_at: int | None = None
    killed_by = FailureKind.KILLED

    def __init__(self, log: list[tuple[int, str, str]], number: int) -> None:
        self.log, self.pid, self.alive = log, number, True
        self.pids = (number,)
        self.open: dict[str, Recipe] = {}
        self.timed = 0

    def load(self, on_progress: object = None) -> None: ...

    def call(self, method: str, *, on_progress: object = None, **arguments: Any) -> Any:
        name = arguments["name"]
        self.log.append((self.pid, method, name))
        if method == "open":
            self.open[name] = arguments["recipe"]
        elif method == "close":
            del self.open[name]
        else:
            recipe = self.open[name]
            self.timed += 1
            if self.timed == self.killed_at:
                self.alive = False
                raise WorkerFailure(self.killed_by, "somebody else's kill")
            return steady(0.1, recipe.batch_size, steps=3, peak_memory_bytes=7)
        return None

    def kill(self) -> None:
        self.alive = False
        self.open.clear()

    close = kill


class Workers:
    """Starts workers and remembers them."""

    def __init__(self, kind: type[Worker] = Worker, killed_at: int | None = None) -> None:
        self.log: list[tuple[int, str, str]] = []
        self.made: list[Worker] = []
        self.kind, self.killed_at = kind, killed_at

    def start(self, settings: WorkerSettings) -> Any:
        worker = self.kind(self.log, len(self.made))
        worker.killed_at = self.killed_at if not self.made else None
        self.made.append(worker)
        return worker

    def runner(self) -> Runner:
        return Runner(WorkerSettings(TaskSource(Path("task.py"))), None, self.start)


def contest(
    workers: Workers,
    recipes: list[Recipe],
    *,
    together: bool = True,
    concurrently: bool = True,
    new_processes: bool = False,
    keeps_processes: bool = False,
    contention_monitor: Any = None,
    shared: Runner | None = None,
) -> tuple[InterleavedTiming, Runner]:
    shared = shared or workers.runner()
    made = InterleavedTiming(
        recipes,
        shared,
        shares=lambda recipe: recipe.keeps_memory,
        seed=0,
        together=together,
        listener=silent,
        contention_monitor=contention_monitor or no_contention(),
        concurrently=concurrently,
        new_processes=new_processes,
        keeps_processes=keeps_processes,
    )
    return made, shared
