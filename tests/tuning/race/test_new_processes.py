"""On a CPU every round has new processes, in which the recipes take many turns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from autoprec.core.recipe import Recipe
from autoprec.core.speed import rounds
from autoprec.core.speed.selection import Finalist
from autoprec.tuning.race import interleaved_timing, sessions
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


def slow(clock: Clock, *, load: float = 0.0, turn: float = 0.0) -> type[Worker]:
    """A worker that takes so many seconds to load, and to time a session."""

    class Slow(Worker):
        loaded = False

        def load(self, on_progress: object = None) -> None:
            if not self.loaded:
                clock.now += load
                self.loaded = True

        def call(self, method: str, **arguments: Any) -> Any:
            if method == "time":
                clock.now += turn
            return super().call(method, **arguments)

    return Slow


def timed_in(workers: Workers) -> list[str]:
    """The sessions in the order in which they were timed, without their warm-ups."""
    timed = [name for _, method, name in workers.log if method in ("open", "time")]
    opened = len(set(timed))
    return [name.removeprefix("final") for name in timed[2 * opened :]]


@pytest.mark.parametrize(
    ("load", "turn", "turns"),
    [
        pytest.param(3.0, 1.0, 4, id="a process that takes as long as four turns"),
        pytest.param(0.0, 1.0, 2, id="a process that takes as long as one turn"),
        pytest.param(900.0, 1.0, 10, id="no more than ten"),
        pytest.param(0.0, 0.0, 1, id="processes that cost nothing"),
    ],
)
def test_a_process_has_as_many_turns_as_its_start_is_worth(
    clock: Clock, load: float, turn: float, turns: int
) -> None:
    workers = Workers(slow(clock, load=load, turn=turn))
    counted: list[tuple[int, int]] = []

    def count(finalists: tuple[Finalist, ...]) -> Collection[int]:
        timed = [method for _, method, _ in workers.log].count("time")
        counted.append((timed - len(workers.made), len(workers.made)))  # less the warm-ups
        return (0,)

    made, _ = contest(workers, [FAST], new_processes=True)
    with made:
        finals = made.run(3, count)
    assert counted == [(turns * ran, ran) for ran in (1, 2, 3)]
    assert [len(final.rates) for final in finals] == [3]
    assert [len(measured) for measured in made.measured] == [3]


def test_processes_that_run_a_users_script_are_kept_for_rounds_as_long(clock: Clock) -> None:
    workers = Workers(slow(clock, load=3.0, turn=1.0))
    made, _ = contest(workers, [FAST], new_processes=True, keeps_processes=True)
    with made:
        made.run(3)
    timed = [method for _, method, _ in workers.log].count("time")
    assert (timed - 1, len(workers.made)) == (3 * 4, 1)  # less the warm-up


def test_what_is_timed_later_uses_the_processes_that_run_a_users_script() -> None:
    workers = Workers()
    made, shared = contest(workers, [PLAIN, FAST], keeps_processes=True)
    with made:
        made.run(1)
    assert [worker.open for worker in workers.made] == [{}, {}]
    others = [LARGE, replace(PLAIN, batch_size=64)]
    later, _ = contest(workers, others, keeps_processes=True, shared=shared)
    with later:
        finals = later.run(1)
    assert [len(final.rates) for final in finals] == [1, 1]
    assert len(workers.made) == 2


def test_a_process_that_served_another_recipe_tells_no_memory_peak() -> None:
    workers = Workers()
    made, shared = contest(workers, [PLAIN], keeps_processes=True)
    with made:
        made.run(1)
    again, _ = contest(workers, [PLAIN], keeps_processes=True, shared=shared)
    with again:
        again.run(1)
    peaks = [timing.measured[0][0].peak_memory_bytes for timing in (made, again)]
    assert peaks == [7, 0]


@pytest.mark.parametrize("how", [{}, {"keeps_processes": True, "together": False}])
def test_processes_end_with_their_rounds_where_a_start_is_cheap_or_memory_is_short(
    how: dict[str, bool],
) -> None:
    workers = Workers()
    made, shared = contest(workers, [PLAIN, FAST], **how)
    with made:
        made.run(1)
    assert not shared.spare
    assert [worker.alive for worker in workers.made].count(True) <= 1  # the shared one


def test_processes_in_which_a_recipe_failed_are_not_kept() -> None:
    workers = Workers()
    made, shared = contest(workers, [PLAIN], keeps_processes=True)
    with pytest.raises(ZeroDivisionError), made:
        raise ZeroDivisionError
    assert not shared.spare
    assert not any(worker.alive for worker in workers.made)


def test_a_round_runs_there_and_back_and_the_next_one_back_and_there(clock: Clock) -> None:
    workers = Workers(slow(clock, turn=1.0))
    made, _ = contest(workers, [FAST, LARGE], new_processes=True)
    order: list[str] = []

    def note(finalists: tuple[Finalist, ...]) -> Collection[int]:
        order.append("".join(timed_in(workers)))
        workers.log.clear()
        return (0, 1)

    with made:
        made.run(2, note)
    assert order == ["0110", "1001"]


class Drawn(Worker):
    """A worker whose turns take seconds given by the session's name and the turn's number."""

    seconds: Mapping[str, Sequence[float]]

    def call(self, method: str, **arguments: Any) -> Any:
        answer = super().call(method, **arguments)
        if method != "time" or not arguments["budget"].seconds:  # a warm step counts for nothing
            return answer
        name = arguments["name"]
        turns = [each for each in self.log if each[1:] == ("time", name) and each[0] == self.pid]
        number = min(len(turns), len(self.seconds[name])) - 1
        return replace(answer, step_seconds=self.seconds[name][number])


def measured_in_a_round(
    monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, Sequence[float]]
) -> list[float]:
    """What a round of four turns tells of FAST and LARGE; the first of `seconds` is the warm-up."""

    class Told(Drawn):
        pass

    Told.seconds = seconds
    monkeypatch.setattr(sessions, "LONGEST_WARM_STEP_SECONDS", 0.0)
    made, _ = contest(Workers(Told), [FAST, LARGE], new_processes=True)
    monkeypatch.setattr(rounds, "round", lambda number: 4, raising=False)
    with made:
        made.run(1)
    return [measured[0].step_seconds for measured in made.measured]


def test_the_time_of_a_round_is_the_middle_of_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is one reading, however often it was looked at."""
    one, other = measured_in_a_round(
        monkeypatch, {"final0": (9, 1.0, 1.1, 1.3, 1.2), "final1": (9, 2.0, 2.0, 2.0, 2.0)}
    )
    assert 1.1 < one < 1.2
    assert other == pytest.approx(2.0, rel=0.05)


def test_what_slows_all_recipes_of_a_turn_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the turns are slow for both, each with another turn that was disturbed by itself."""
    one, other = measured_in_a_round(
        monkeypatch, {"final0": (9, 1.0, 1.0, 1.5, 1.5), "final1": (9, 2.0, 2.0, 3.0, 3.0)}
    )
    assert other / one == pytest.approx(2.0)
    one, other = measured_in_a_round(
        monkeypatch, {"final0": (9, 1.0, 1.0, 1.5, 1.6), "final1": (9, 2.0, 2.3, 3.0, 3.0)}
    )
    assert other / one == pytest.approx(2.0, rel=0.08)


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


def test_sessions_that_are_not_open_together_have_new_workers_too(clock: Clock) -> None:
    """One worker for recipes that keep freed memory; the first session of each is not counted."""
    workers = Workers(slow(clock))
    made, _ = contest(workers, [PLAIN, FAST, LARGE], together=False, new_processes=True)
    with made:
        made.run(3)
    assert len(workers.made) == 2 * 3
    opened = [(worker, name) for worker, method, name in workers.log if method == "open"]
    assert len(opened) == 3 * (2 + 3)
    assert len({worker for worker, name in opened if name == "final0"}) == 3
    kept = [{w for w, name in opened if name == f"final{index}"} for index in (1, 2)]
    assert kept[0] == kept[1]


def test_a_race_keeps_its_workers(clock: Clock) -> None:
    workers = Workers(slow(clock, load=9.0))
    made, _ = contest(workers, [PLAIN, FAST, LARGE], together=False)
    with made:
        made.run(3)
    assert len(workers.made) == 2
    assert [method for _, method, _ in workers.log].count("open") == 2 + 3 * 3


def test_no_session_is_opened_for_a_finalist_that_is_out(clock: Clock) -> None:
    workers = Workers(slow(clock))
    made, _ = contest(workers, [PLAIN, FAST, LARGE], new_processes=True)
    with made:
        made.run(3, lambda finalists: (0, 2))
    opened = [name for _, method, name in workers.log if method == "open"]
    assert sorted(opened) == ["final0"] * 3 + ["final1"] + ["final2"] * 3


@pytest.mark.parametrize("framework", ["torch", "keras"])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_processes_are_replaced_on_a_cpu_where_torchs_give_memory_back_alone(
    on_cpu: bool, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[bool, bool]] = []
    shared: list[bool] = []

    class Heard(FakeTiming):
        def __init__(self, recipes: list[Recipe], *args: Any, **how: Any):
            given.append((how["new_processes"], how["together"]))
            shared.extend(how["shares"](recipe) for recipe in recipes)
            super().__init__(recipes)

    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Heard)
    job: Any = SimpleNamespace(**{**vars(JOB), "on_cpu": on_cpu})
    trials: Any = SimpleNamespace(framework=framework, peak_memory_of=lambda recipe: 0)
    runner = Workers().runner()
    interleaved_timing.time_interleaved(job, [PLAIN, FAST], 1, trials, runner)
    assert shared == [not on_cpu or framework == "keras", True]
    interleaved_timing.time_interleaved(job, [PLAIN], 1, trials, runner, new_processes=False)
    assert given == [(on_cpu, True), (False, True)]


@pytest.mark.parametrize(("plain", "started"), [(True, 2), (False, 1)])
def test_a_script_that_runs_beside_the_shared_worker_does_not_start_it_anew(
    plain: bool, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", FakeTiming)
    job: Any = SimpleNamespace(
        **{**vars(JOB), "on_cpu": True, "task": SimpleNamespace(plain=plain)}
    )
    trials: Any = SimpleNamespace(framework="torch", peak_memory_of=lambda recipe: 0)
    workers = Workers()
    runner = workers.runner()
    runner.load()
    if not plain:
        runner.spare.append(runner.another(keeps_memory=False))
    interleaved_timing.time_interleaved(job, [PLAIN, FAST], 1, trials, runner)
    runner.load()
    assert len(workers.made) == started


@pytest.mark.parametrize(("limit", "together"), [(1 << 30, False), (2 << 30, True)])
def test_processes_that_do_not_fit_in_memory_run_one_at_a_time(limit: int, together: bool) -> None:
    """Each process takes half a GiB of its own; what shares one takes none."""
    job: Any = SimpleNamespace(**{**vars(JOB), "on_cpu": True, "memory_bytes": limit})
    trials: Any = SimpleNamespace(framework="torch", peak_memory_of=lambda recipe: 1 << 28)
    other = replace(PLAIN, batch_size=64)
    assert interleaved_timing.fit_in_memory_together(job, [PLAIN, other], trials) is together
    assert interleaved_timing.fit_in_memory_together(job, [FAST, LARGE], trials)


@pytest.mark.parametrize(("second", "turns"), [(1.0, 3), (1.5, 10)])
def test_turns_end_where_they_tell_enough(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, second: float, turns: int
) -> None:
    """Every second turn of one recipe differs or does not; the processes would be worth ten."""

    class Told(Drawn):
        seconds: ClassVar = {"final0": [1.0] * 20, "final1": [1.0, second] * 10}

        def call(self, method: str, **arguments: Any) -> Any:
            clock.now += 900.0 if method == "open" else 1.0
            return super().call(method, **arguments)

    monkeypatch.setattr(sessions, "LONGEST_WARM_STEP_SECONDS", 0.0)
    workers = Workers(Told)
    made, _ = contest(workers, [FAST, LARGE], new_processes=True)
    with made:
        made.run(1)
    assert len(timed_in(workers)) == 2 * turns
