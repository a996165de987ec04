"""On a CPU sessions and workers are renewed between rounds, as often as time allows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from factories import steady

from autoprec.core.recipe import Recipe
from autoprec.core.speed.selection import Finalist
from autoprec.tuning.confirmation import interleaved_timing
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
    return clock


def slow(
    clock: Clock, *, load: float = 0.0, first: float = 0.0, again: float = 0.0
) -> type[Worker]:
    """A worker that takes so many seconds to load, to open its first session, and each other."""

    class Slow(Worker):
        loaded = opened = False

        def load(self, on_progress: object = None) -> None:
            if not self.loaded:
                clock.now += load
                self.loaded = True

        def call(self, method: str, **arguments: Any) -> Any:
            if method == "open":
                clock.now += again if self.opened else first
                self.opened = True
            return super().call(method, **arguments)

    return Slow


def sessions_and_workers(
    clock: Clock, recipes: list[Recipe], rounds: int, renewal_seconds: float, **seconds: float
) -> list[tuple[int, int]]:
    """How many sessions and workers there have been at the end of each round."""
    workers = Workers(slow(clock, **seconds))
    counted: list[tuple[int, int]] = []

    def count(finalists: tuple[Finalist, ...]) -> Collection[int]:
        opened = [method for _, method, _ in workers.log].count("open")
        counted.append((opened, len(workers.made)))
        return range(len(recipes))

    made, _ = contest(workers, recipes, renewal_seconds=renewal_seconds)
    with made:
        finals = made.run(rounds, count)
    assert [len(final.rates) for final in finals] == [rounds] * len(recipes)
    assert [len(measured) for measured in made.measured] == [rounds] * len(recipes)
    return counted


def test_every_round_has_a_session_of_its_own_and_a_new_worker_when_time_is_saved_up(
    clock: Clock,
) -> None:
    # Three seconds a round; a session takes one, a worker with its first session four: two are
    # saved up in the first renewal, one is left by the second and none by the third.
    assert sessions_and_workers(clock, [FAST], 5, 3.0, load=3.0, first=1.0, again=1.0) == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 3),
        (5, 3),
    ]


def test_what_the_first_session_of_a_worker_costs_more_is_not_expected_of_the_next(
    clock: Clock,
) -> None:
    # Two seconds for the first, half a second from then on: two and a half are saved up after it.
    assert sessions_and_workers(clock, [FAST], 4, 2.0, load=90.0, first=2.0, again=0.5) == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
    ]


def test_what_a_new_worker_costs_is_learned_where_the_first_ran_already(clock: Clock) -> None:
    workers = Workers(slow(clock, load=9.0, first=1.0, again=1.0))
    made, shared = contest(workers, [FAST], renewal_seconds=3.0)
    shared.load()
    with made:
        made.run(6)
    # Ten seconds for the second worker are saved up again in four rounds; a session takes one.
    assert len(workers.made) == 2
    assert [method for _, method, _ in workers.log].count("open") == 4


def test_dear_sessions_are_renewed_as_seldom_as_their_time_allows(clock: Clock) -> None:
    assert [
        opened
        for opened, _ in sessions_and_workers(
            clock, [FAST], 7, 1.0, load=90.0, first=3.0, again=3.0
        )
    ] == [1, 1, 1, 2, 2, 2, 3]


def test_without_time_for_it_the_sessions_stay(clock: Clock) -> None:
    counted = sessions_and_workers(clock, [PLAIN, FAST], 6, 0.0, load=1.0, first=1.0, again=1.0)
    assert counted == [(2, 2)] * 6


def test_new_workers_replace_all_and_the_shared_one_is_left_alone_and_empty(clock: Clock) -> None:
    workers = Workers(slow(clock))
    made, shared = contest(workers, [PLAIN, FAST, LARGE], renewal_seconds=1.0)
    with made:
        made.run(3)
        assert [worker.alive for worker in workers.made] == [False] * 4 + [True] * 2
        assert sorted(len(worker.open) for worker in workers.made[4:]) == [1, 2]
    (kept,) = [worker for worker in workers.made if worker.alive]
    assert (kept.pid,) == shared.pids
    assert kept.open == {}


def test_no_session_is_opened_for_a_finalist_that_is_out(clock: Clock) -> None:
    workers = Workers(slow(clock, load=90.0))
    made, _ = contest(workers, [PLAIN, FAST, LARGE], renewal_seconds=1.0)
    with made:
        made.run(3, lambda finalists: (0, 2))
    opened = [name for _, method, name in workers.log if method == "open"]
    assert sorted(opened) == ["final0"] * 3 + ["final1"] + ["final2"] * 3
    assert len([method for _, method, _ in workers.log if method == "close"]) == 3 + 2 + 1


def test_a_turn_in_a_slower_session_is_not_repeated_until_it_is_like_the_last_session(
    clock: Clock,
) -> None:
    class Drawn(slow(clock, load=90.0)):  # type: ignore[misc]
        def call(self, method: str, **arguments: Any) -> Any:
            answer = super().call(method, **arguments)
            if method != "time":
                return answer
            opened = [method for _, method, _ in self.log].count("open")
            return replace(steady(0.1, 64, steps=1), step_seconds=0.1 * opened)

    workers = Workers(Drawn)
    made, _ = contest(workers, [FAST], renewal_seconds=1.0)
    with made:
        made.run(3)
    assert [m.step_seconds for m in made.measured[0]] == pytest.approx([0.1, 0.2, 0.3])
    assert [method for _, method, _ in workers.log].count("time") == 2 * 3  # a warm-up each


@pytest.mark.parametrize(("on_cpu", "renews"), [(True, True), (False, False)])
def test_sessions_are_renewed_on_a_cpu_only(
    on_cpu: bool, renews: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    class Heard(FakeTiming):
        def __init__(self, *args: Any, renewal_seconds: float, **named: Any) -> None:
            given.append(renewal_seconds)
            super().__init__(*args, **named)

    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Heard)
    job: Any = SimpleNamespace(**{**vars(JOB), "on_cpu": on_cpu})
    trials: Any = SimpleNamespace(framework="torch", peak_memory_of=lambda recipe: 0)
    interleaved_timing.time_interleaved(job, [PLAIN], 1, trials, Workers().runner())
    assert [seconds > 0 for seconds in given] == [renews]
