"""On a CPU every round has new processes, and every turn a session of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.core.recipe import Recipe
from autoprec.core.speed.selection import Finalist
from autoprec.tuning.confirmation import interleaved_timing, sessions
from tests.tuning.fake_timing import JOB, FakeTiming
from tests.tuning.fake_workers import FAST, LARGE, PLAIN, Worker, Workers, contest


class Clock:
    """The time, which passes only where a worker says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(interleaved_timing, "time", clock)
    monkeypatch.setattr(sessions, "time", clock)
    return clock


def slow(clock: Clock, *, load: float = 0.0, session: float = 0.0) -> type[Worker]:
    """A worker that takes so many seconds to load, and for each session that it opens."""

    class Slow(Worker):
        loaded = False

        def load(self, on_progress: object = None) -> None:
            if not self.loaded:
                clock.now += load
                self.loaded = True

        def call(self, method: str, **arguments: Any) -> Any:
            if method == "open":
                clock.now += session
            return super().call(method, **arguments)

    return Slow


@pytest.mark.parametrize(
    ("load", "session", "turns"),
    [
        pytest.param(4.0, 1.0, 4, id="as many turns as cost as much again"),
        pytest.param(1.0, 1.0, 2, id="a process that costs what a session does"),
        pytest.param(1.0, 40.0, 1, id="dear sessions"),
        pytest.param(900.0, 1.0, 4, id="no more than four"),
        pytest.param(0.0, 1.0, 1, id="processes that cost nothing"),
    ],
)
def test_a_process_has_as_many_sessions_as_its_start_is_worth(
    clock: Clock, load: float, session: float, turns: int
) -> None:
    workers = Workers(slow(clock, load=load, session=session))
    counted: list[tuple[int, int]] = []

    def count(finalists: tuple[Finalist, ...]) -> Collection[int]:
        opened = [method for _, method, _ in workers.log].count("open")
        counted.append((opened, len(workers.made)))
        return (0,)

    made, _ = contest(workers, [FAST], new_processes=True)
    with made:
        finals = made.run(3, count)
    assert counted == [(turns * ran, ran) for ran in (1, 2, 3)]
    assert [len(final.rates) for final in finals] == [3]
    assert [len(measured) for measured in made.measured] == [3]


def test_a_round_runs_there_and_back_and_the_next_one_back_and_there(clock: Clock) -> None:
    workers = Workers(slow(clock, load=1.0, session=0.5))
    made, _ = contest(workers, [FAST, LARGE], new_processes=True)
    order: list[str] = []

    def note(finalists: tuple[Finalist, ...]) -> Collection[int]:
        timed = [name for _, method, name in workers.log if method == "time"]
        turns = list(zip(timed[::2], timed[1::2], strict=True))
        order.extend("".join(n.removeprefix("final") for n in turn) for turn in turns[1::2])
        workers.log.clear()
        return (0, 1)

    with made:
        made.run(2, note)
    assert order == ["01", "10", "10", "01"]  # after the warm-ups, which run in the same order


def test_the_rate_of_a_round_is_the_middle_of_its_turns(clock: Clock) -> None:
    """A process is one reading, however often it was looked at."""

    class Drawn(slow(clock, load=4.0, session=1.0)):  # type: ignore[misc]
        def call(self, method: str, **arguments: Any) -> Any:
            answer = super().call(method, **arguments)
            opened = [method for _, method, _ in self.log].count("open")
            return replace(answer, step_seconds=0.1 + 0.01 * opened) if method == "time" else answer

    made, _ = contest(Workers(Drawn), [FAST], new_processes=True)
    with made:
        made.run(2)
    assert [m.step_seconds for m in made.measured[0]] == pytest.approx([0.125, 0.165])


def test_new_workers_replace_all_and_the_shared_one_is_left_alone_and_empty(clock: Clock) -> None:
    workers = Workers(slow(clock))
    made, shared = contest(workers, [PLAIN, FAST, LARGE], new_processes=True)
    with made:
        made.run(3)
        assert [worker.alive for worker in workers.made] == [False] * 4 + [True] * 2
        assert sorted(len(worker.open) for worker in workers.made[4:]) == [1, 2]
    (kept,) = [worker for worker in workers.made if worker.alive]
    assert (kept.pid,) == shared.pids
    assert kept.open == {}


def test_what_does_not_fit_together_has_new_workers_too(clock: Clock) -> None:
    workers = Workers(slow(clock, load=9.0))
    made, _ = contest(workers, [PLAIN, FAST, LARGE], together=False, new_processes=True)
    with made:
        made.run(3)
    assert len(workers.made) == 2 * 3
    assert [method for _, method, _ in workers.log].count("open") == 3 * 3


def test_no_session_is_opened_for_a_finalist_that_is_out(clock: Clock) -> None:
    workers = Workers(slow(clock))
    made, _ = contest(workers, [PLAIN, FAST, LARGE], new_processes=True)
    with made:
        made.run(3, lambda finalists: (0, 2))
    opened = [name for _, method, name in workers.log if method == "open"]
    assert sorted(opened) == ["final0"] * 3 + ["final1"] + ["final2"] * 3


@pytest.mark.parametrize("on_cpu", [True, False])
def test_processes_are_replaced_on_a_cpu_only(
    on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []

    class Heard(FakeTiming):
        def __init__(self, recipes: list[Recipe], *args: Any, new_processes: bool, **_: Any):
            given.append(new_processes)
            super().__init__(recipes)

    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Heard)
    job: Any = SimpleNamespace(**{**vars(JOB), "on_cpu": on_cpu})
    trials: Any = SimpleNamespace(framework="torch", peak_memory_of=lambda recipe: 0)
    interleaved_timing.time_interleaved(job, [PLAIN], 1, trials, Workers().runner())
    assert given == [on_cpu]
