"""A contest: who runs in whose worker, in which order, and when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from factories import steady

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.speed.selection import Finalist
from autoprec.tuning.confirmation.interleaved_timing import (
    FinalistFailed,
    InterleavedTiming,
    may_share_worker,
)
from autoprec.tuning.events import silent
from autoprec.workers.client import WorkerSettings
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.runner import RETRIED_FAILURES, Runner

KEPT = {KEEP_MEMORY: True}
PLAIN = Recipe(batch_size=32)
FAST = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=64, knobs=KEPT)
LARGE = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=128, knobs=KEPT)
WATCH = cast(Any, SimpleNamespace(over=lambda pids: nullcontext()))


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

    def __init__(self, killed_at: int | None = None) -> None:
        self.log: list[tuple[int, str, str]] = []
        self.made: list[Worker] = []
        self.killed_at = killed_at

    def start(self, settings: WorkerSettings) -> Any:
        worker = Worker(self.log, len(self.made))
        worker.killed_at = self.killed_at if not self.made else None
        self.made.append(worker)
        return worker

    def runner(self) -> Runner:
        return Runner(WorkerSettings(Path("task.py")), None, self.start)


def contest(
    workers: Workers, recipes: list[Recipe], *, together: bool = True, concurrently: bool = True
) -> tuple[InterleavedTiming, Runner]:
    shared = workers.runner()
    made = InterleavedTiming(
        recipes,
        shared,
        workers.runner,
        shares=lambda recipe: recipe.keeps_memory,
        seed=0,
        together=together,
        listener=silent,
        contention_monitor=WATCH,
        concurrently=concurrently,
    )
    return made, shared


def test_those_who_may_share_run_in_one_worker_and_leave_it_as_it_was() -> None:
    workers = Workers()
    made, shared = contest(workers, [PLAIN, FAST, LARGE])
    with made:
        finals = made.run(2)
        assert {len(worker.open) for worker in workers.made} == {1, 2}
    assert [len(final.rates) for final in finals] == [2, 2, 2]
    assert len(workers.made) == 2
    (kept,) = [worker for worker in workers.made if worker.pid in shared.pids]
    assert kept.alive
    assert kept.open == {}
    assert not next(worker for worker in workers.made if worker is not kept).alive


def test_the_order_turns_round_in_every_second_round() -> None:
    workers = Workers()
    made, _ = contest(workers, [FAST, LARGE])
    with made:
        workers.log.clear()
        made.run(2)
        assert [name for _, _, name in workers.log] == ["final0", "final1", "final1", "final0"]


@pytest.mark.parametrize(
    ("step_seconds", "expected"),
    [
        # The second round begins with who ran last in the first.
        pytest.param(0.1, ["lead", 0, "lead", 1, 1, "lead", 0], id="short steps"),
        pytest.param(2.0, [0, 1, 1, 0], id="steps against which it is lost"),
    ],
)
def test_a_turn_after_another_worker_begins_with_a_step_that_does_not_count(
    step_seconds: float, expected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []

    class Slow(Worker):
        def call(self, method: str, **arguments: Any) -> Any:
            answer = super().call(method, **arguments)
            if answer is None:
                return None
            lead = arguments["budget"].seconds == 0
            heard.append("lead" if lead else int(arguments["name"].removeprefix("final")))
            return replace(answer, step_seconds=9.0 if lead else step_seconds)

    monkeypatch.setitem(globals(), "Worker", Slow)
    made, _ = contest(Workers(), [PLAIN, FAST])
    with made:
        heard.clear()
        finals = made.run(2)
    assert heard == expected
    assert [final.rates for final in finals] == [(32 / step_seconds,) * 2, (64 / step_seconds,) * 2]


def test_a_peak_that_others_share_is_nobodys() -> None:
    made, _ = contest(Workers(), [PLAIN, FAST, LARGE])
    with made:
        made.run(1)
    assert [m[0].peak_memory_bytes for m in made.measured] == [7, 0, 0]


def test_rounds_end_when_they_settle_it() -> None:
    made, _ = contest(Workers(), [PLAIN, FAST])

    def three_rounds(finals: tuple[Finalist, ...]) -> Collection[int]:
        return range(2) if len(finals[0].rates) < 3 else ()

    with made:
        assert [len(f.rates) for f in made.run(9, three_rounds)] == [3, 3]


def test_who_is_out_runs_no_further_round() -> None:
    workers, heard = Workers(), []
    made, _ = contest(workers, [PLAIN, FAST, LARGE])
    made._listener = heard.append
    with made:
        finals = made.run(4, lambda finals: (1, 2) if len(finals[1].rates) < 3 else (1,))
    assert [len(final.rates) for final in finals] == [1, 4, 3]
    assert [tuple(map(bool, event.rates)) for event in heard] == [
        (True, True, True),
        (False, True, True),
        (False, True, True),
        (False, True, False),
    ]


def paced(steps: Iterator[float]) -> type[Worker]:
    """A worker whose timings are these, in seconds a step, a step each."""

    class Paced(Worker):
        def call(self, method: str, **arguments: Any) -> Any:
            answer = super().call(method, **arguments)
            return answer if answer is None else replace(answer, step_seconds=next(steps), steps=1)

    return Paced


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        # What is not reached in half a second is not waited for again, until it was reached.
        pytest.param(
            [[0.1], [0.3, 0.1], [0.5], [0.5], [0.1], [0.4, 0.1]],
            [0.1, 0.1, 0.5, 0.5, 0.1, 0.1],
            id="a step a turn",
        ),
        # Short steps fill their turns of 0.15 s.
        pytest.param([[0.01], [0.02] * 4, [0.02]], [0.01, 0.02, 0.02], id="many steps a turn"),
        # One long step is wait enough.
        pytest.param([[2.0], [3.0], [3.0]], [2.0, 3.0, 3.0], id="long steps"),
        # Who varies by itself is waited for a second in all.
        pytest.param(
            [[0.2], [0.4, 0.4], [0.2], [0.4, 0.2], [0.4], [0.2], [0.4]],
            [0.2, 0.4, 0.2, 0.2, 0.4, 0.2, 0.4],
            id="varying",
        ),
    ],
)
def test_a_disturbed_turn_goes_on_until_the_recipe_runs_as_before(
    turns: list[list[float]], kept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter([turns[0][0], *(step for turn in turns for step in turn)])  # a warm-up first

    monkeypatch.setitem(globals(), "Worker", paced(steps))
    made, _ = contest(Workers(), [FAST])
    with made:
        made.run(len(turns))
    assert [m.step_seconds for m in made.measured[0]] == kept
    assert next(steps, None) is None


def test_a_machine_that_has_become_slower_is_waited_for_once_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = [0.1, 0.2], [*[0.3] * 2, 0.15], [0.15, 0.3]
    steps = iter([0.1, 0.2, *chain(*rounds)])  # a warm-up first

    monkeypatch.setitem(globals(), "Worker", paced(steps))
    made, _ = contest(Workers(), [FAST, LARGE])
    with made:
        made.run(3)
    assert [[m.step_seconds for m in of] for of in made.measured] == [
        [0.1, 0.15, 0.15],
        [0.2, 0.3, 0.3],
    ]
    assert next(steps, None) is None


def test_what_does_not_fit_together_is_opened_for_its_turn() -> None:
    workers = Workers()
    made, _ = contest(workers, [PLAIN, FAST, LARGE], together=False)
    with made:
        made.run(2)
        assert all(not worker.open for worker in workers.made)
    methods = [method for _, method, name in workers.log if name == "final2"]
    assert methods == ["open", "time", "close"] * 2


def test_on_an_accelerator_workers_start_side_by_side_and_sessions_open_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both, opening = threading.Barrier(2, timeout=60), threading.Semaphore(1)

    class Limited(Worker):
        loaded = False

        def load(self, on_progress: object = None) -> None:
            if not self.loaded:
                self.loaded = True
                both.wait()  # a worker that waits here alone breaks the barrier

        def call(self, method: str, **arguments: Any) -> Any:
            assert opening.acquire(blocking=False), "two sessions at a time"
            time.sleep(0.01)
            opening.release()
            return super().call(method, **arguments)

    monkeypatch.setitem(globals(), "Worker", Limited)
    workers = Workers()
    made, _ = contest(workers, [PLAIN, Recipe(batch_size=8)], concurrently=False)
    with made:
        assert [method for _, method, _ in workers.log[:2]] == ["open", "open"]
    assert len(workers.made) == 2


@pytest.mark.parametrize("kind", RETRIED_FAILURES)
def test_a_worker_that_was_killed_or_faulted_comes_back_with_all_its_sessions(
    kind: FailureKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "killed_by", kind)
    workers = Workers(killed_at=4)
    made, _ = contest(workers, [FAST, LARGE])
    with made:
        finals = made.run(3)
        assert len(workers.made) == 2
        assert set(workers.made[1].open) == {"final0", "final1"}
    assert [len(final.rates) for final in finals] == [3, 3]


def test_one_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Worker):
        def call(self, method: str, **arguments: Any) -> Any:
            if arguments.get("recipe") == LARGE:
                raise WorkerFailure(FailureKind.OUT_OF_MEMORY, "no room")
            return super().call(method, **arguments)

    monkeypatch.setitem(globals(), "Worker", Full)
    made, _ = contest(Workers(), [FAST, LARGE])
    with pytest.raises(FinalistFailed) as info, made:
        pass
    assert info.value.recipe == LARGE


@pytest.mark.parametrize(
    ("recipe", "framework", "shares"),
    [
        (PLAIN, "torch", False),
        (FAST, "torch", True),
        (Recipe(compile=True, knobs=KEPT), "torch", False),
        (Recipe(knobs={**KEPT, "threads": 1}), "torch", False),
        (PLAIN, "keras", True),
        (Recipe(compile=True), "keras", True),
        (Recipe(knobs={"threads": 1}), "keras", False),
    ],
)
def test_only_what_nothing_in_the_process_disturbs_shares_it(
    recipe: Recipe, framework: str, shares: bool
) -> None:
    assert may_share_worker(recipe, framework) is shares
