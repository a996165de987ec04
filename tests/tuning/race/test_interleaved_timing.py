"""A contest: who runs in whose worker, in which order, and when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from factories import measured_twice

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.selection import Finalist
from autoprec.tuning.race.interleaved_timing import shares_worker
from autoprec.tuning.race.sessions import FinalistFailed
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.runner import RETRIED_FAILURES
from tests.tuning.fake_timing import JOB
from tests.tuning.fake_workers import FAST, LARGE, PLAIN, Worker, Workers, contest


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
    step_seconds: float, expected: list[object]
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

    made, _ = contest(Workers(Slow), [PLAIN, FAST])
    with made:
        heard.clear()
        finals = made.run(2)
    assert heard == expected
    assert [final.rates for final in finals] == [(32 / step_seconds,) * 2, (64 / step_seconds,) * 2]


@pytest.mark.parametrize("together", [True, False])
def test_a_turn_that_other_processes_disturb_is_taken_again(together: bool) -> None:
    turns = chain(*([9.0, 0.25] for _ in range(4)))

    class Disturbed(Worker):
        def call(self, method: str, **arguments: Any) -> Any:
            answer = super().call(method, **arguments)
            if answer is None or arguments["budget"].seconds != SPEED.turn_seconds:
                return answer
            return replace(answer, step_seconds=next(turns))

    made, _ = contest(
        Workers(Disturbed), [PLAIN, FAST], together=together, contention_monitor=measured_twice()
    )
    with made:
        finals = made.run(2)
    assert [final.rates for final in finals] == [(32 / 0.25,) * 2, (64 / 0.25,) * 2]


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
        pytest.param([[0.1], [0.16], [0.08]], [0.1, 0.16, 0.08], id="as sessions differ"),
        pytest.param([[0.1], [0.6, 0.11]], [0.1, 0.11], id="much slower"),
        pytest.param([[0.1], [0.01, 0.11]], [0.1, 0.11], id="much faster"),
        pytest.param([[0.1], [0.6, 0.5]], [0.1, 0.5], id="slower again: the second counts"),
        pytest.param([[0.1], [0.6, 0.7], [0.8, 0.1]], [0.1, 0.7, 0.1], id="slower, then not"),
    ],
)
def test_a_turn_far_from_the_others_is_timed_once_more_whichever_way_it_is_off(
    turns: list[list[float]], kept: list[float]
) -> None:
    steps = iter([turns[0][0], *(step for turn in turns for step in turn)])  # a warm-up first

    made, _ = contest(Workers(paced(steps)), [FAST])
    with made:
        made.run(len(turns))
    assert [m.step_seconds for m in made.measured[0]] == kept
    assert next(steps, None) is None


def test_what_does_not_fit_together_is_opened_for_its_turn() -> None:
    workers = Workers()
    made, _ = contest(workers, [PLAIN, FAST, LARGE], together=False)
    with made:
        made.run(2)
        assert all(not worker.open for worker in workers.made)
    methods = [method for _, method, name in workers.log if name == "final2"]
    assert methods == ["open", "time", "time", "close"] * 2


def test_what_is_opened_for_its_turn_is_warmed_up_first() -> None:
    first, rest = [7.0], [0.5, 0.1, 0.9, 0.2, 0.7, 0.2, 0.3, 0.1]  # a new session's are slow
    steps = iter(first + rest)
    made, _ = contest(Workers(paced(steps)), [FAST, LARGE], together=False)
    with made:
        made.run(2)
    assert [[m.step_seconds for m in of] for of in made.measured] == [[0.1, 0.1], [0.2, 0.2]]
    assert next(steps, None) is None


def test_on_an_accelerator_workers_start_side_by_side_and_sessions_open_in_turn() -> None:
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

    workers = Workers(Limited)
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


def test_one_that_fails_is_named() -> None:
    class Full(Worker):
        def call(self, method: str, **arguments: Any) -> Any:
            if arguments.get("recipe") == LARGE:
                raise WorkerFailure(FailureKind.OUT_OF_MEMORY, "no room")
            return super().call(method, **arguments)

    made, _ = contest(Workers(Full), [FAST, LARGE])
    with pytest.raises(FinalistFailed) as info, made:
        pass
    assert info.value.recipe == LARGE


@pytest.mark.parametrize(
    ("recipe", "framework", "shares"),
    [
        (PLAIN, "keras", True),
        (Recipe(compile=True), "keras", True),
        (Recipe(knobs={"threads": 1}), "keras", False),
        (PLAIN, "torch", False),
        (FAST, "torch", True),
        (Recipe(knobs={**FAST.knobs, "threads": 1}), "torch", False),
        (Recipe(knobs={**FAST.knobs, "implicit_bfloat16": True}), "torch", True),
        (replace(FAST, compile=True), "torch", False),
    ],
)
def test_only_what_changes_nothing_of_the_process_shares_it(
    recipe: Recipe, framework: str, shares: bool
) -> None:
    assert shares_worker(JOB, recipe, framework) is shares


@pytest.mark.parametrize(
    ("recipe", "shares"),
    [
        (PLAIN, True),
        (FAST, True),
        (Recipe(knobs={"cudnn_benchmark": True}), True),
        (Recipe(Policy.TF32), False),
        (Recipe(compile=True), False),
    ],
)
def test_on_an_accelerator_recipes_share_a_process(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, shares: bool
) -> None:
    monkeypatch.setattr(JOB, "on_cpu", False)
    assert shares_worker(JOB, recipe, "torch") is shares
