"""The search as the tuner runs it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from factories import measured_twice, no_contention, ran_at

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.speed.space import BATCH, Point, Space, point_key, powers_of_two
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.events import Event, Note, TrialFinished
from autoprec.tuning.search import loop as search_loop
from autoprec.tuning.search.loop import Search
from autoprec.tuning.search.samplers import sampler_of
from autoprec.tuning.search.task_space import baseline_point
from autoprec.tuning.study.study import Study
from autoprec.tuning.time_limit import Deadline

SPACE = Space(
    policies=(Policy.FLOAT32, Policy.MIXED_BFLOAT16),
    batch_sizes=powers_of_two(8, 4096),
    memory_formats=("contiguous", "channels_last"),
)

#: Samples per second of a recorded tuning of a U-Net, by policy, layout and batch. Its trial of
#: batch 512 was disturbed; re-ranking timed these at `CORRECTED`.
RECORDED = {
    ("float32", "contiguous"): {32: 1223, 256: 1223},
    ("mixed_bfloat16", "channels_last"): {8: 807, 128: 1354, 256: 1428},
    ("mixed_bfloat16", "contiguous"): {
        16: 1081,
        32: 1457,
        64: 1567,
        128: 1739,
        256: 1716,
        512: 1609,
    },
}
CORRECTED = {32: 1372.0, 64: 1595.0, 128: 1645.0, 256: 1749.0, 512: 1900.0, 1024: 2000.0}

#: Synthetic: what that tuning did not try and this one may (1024 is disturbed, too, and comes to
#: the rate above); elsewhere the nearest recorded batch.
SYNTHETIC = {
    ("mixed_bfloat16", "contiguous"): {1024: 1500, 2048: 1200},
    ("float32", "channels_last"): {8: 800},
}


def rate(point: Point) -> float:
    batch, of = int(point[BATCH]), (str(point["policy"]), str(point["memory_format"]))
    known = {**RECORDED.get(of, {}), **SYNTHETIC.get(of, {})}
    return float(known[min(known, key=lambda size: abs(math.log2(size / batch)))])


def measured(runner: object, point: Point, recipe: Recipe, **_: object) -> Outcome:
    return ran_at(point, rate(point), peak_memory_bytes=1, warmup_seconds=0.5)


class Tuning:
    """A search on recorded rates, with what it said."""

    def __init__(
        self,
        folder: Path,
        space: Space = SPACE,
        memory_bytes: int | None = None,
        contention_monitor: Any = None,
        **options: Any,
    ) -> None:
        self.events: list[Event] = []
        settings = {"sampler": "cost", "search_limit": None, "trials": None, "seed": 0, **options}
        job = SimpleNamespace(
            options=SimpleNamespace(**settings),
            listener=self.events.append,
            memory_bytes=memory_bytes,
            contention_monitor=contention_monitor or no_contention(),
            deadline=Deadline(),
        )
        self.job = job
        self.study = Study(folder / "study.journal", "unet")
        self.study.set_space(space, sampler_of(str(settings["sampler"]), 0))
        self.now = 0.0
        self.baseline = {**baseline_point(space), BATCH: 32}
        self.search = Search(
            cast(Any, job), self.study, space, self.baseline, clock=lambda: self.now
        )

    def limit(self, seconds: float) -> None:
        """Give the tuning so many seconds, from now on."""
        self.job.deadline = Deadline(self.now, seconds, lambda: self.now)

    def run(self) -> list[int]:
        """Search; return the batches of the trials that it made."""
        self.events.clear()
        runner = SimpleNamespace(pids=(), load=lambda: None)
        self.history = self.search.run(cast(Any, runner))
        return [e.recipe.batch_size for e in self.events if isinstance(e, TrialFinished)]

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuning:
    monkeypatch.setattr(search_loop, "run_trial", measured)
    return Tuning(tmp_path)


def test_the_search_says_why_it_ends(tuning: Tuning) -> None:
    assert 1024 in tuning.run()
    assert [note.split(":")[0] for note in tuning.notes] == ["the search ends"]


def test_a_trial_that_other_processes_disturb_runs_again_unless_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: dict[object, int] = {}

    def disturbed_first(runner: object, point: Point, recipe: Recipe, **_: object) -> Outcome:
        ran[point_key(point)] = ran.get(point_key(point), 0) + 1
        if recipe.batch_size == 4096:
            return Outcome(point, Status.CRASHED, reason="planted")
        return ran_at(point, rate(point) / (20 if ran[point_key(point)] == 1 else 1))

    monkeypatch.setattr(search_loop, "run_trial", disturbed_first)
    tuning = Tuning(tmp_path, contention_monitor=measured_twice(), sampler="grid")
    tuning.run()
    assert {o.rate for o in tuning.history if o.rate} == {
        rate(o.point) for o in tuning.history if o.rate
    }
    assert {o.rate > 0: ran[point_key(o.point)] for o in tuning.history} == {True: 2, False: 1}


def test_a_search_that_its_limit_ended_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = Tuning(tmp_path, search_limit=100.0)

    def slow(runner: object, point: Point, recipe: Recipe, **_: object) -> Outcome:
        tuning.now += 40.0
        return measured(runner, point, recipe)

    monkeypatch.setattr(search_loop, "run_trial", slow)
    tuning.run()
    assert len(tuning.history) == 3
    assert tuning.search.not_covered == ("recipes the search had no time to try",)
    assert tuning.notes == ["the search ends: the search's limit of 100 s is reached"]


KEEPING = replace(SPACE, knobs={KEEP_MEMORY: (False, True)})


@pytest.mark.parametrize(
    ("paces", "said"),
    [
        ((1.0,), ""),
        ((0.7,), ""),
        ((0.5, 0.9), ""),
        ((0.5, 0.5), "at 0.5x the speed of the earlier trials: they are measured again"),
        ((72.0, 72.0), "at 72x"),
        ((0.0,), ""),
    ],
    ids=["as before", "noise", "disturbed once", "slower", "faster", "fails"],
)
def test_a_study_that_goes_on_at_another_pace_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paces: tuple[float, ...], said: str
) -> None:
    monkeypatch.setattr(search_loop, "run_trial", measured)
    tuning = Tuning(tmp_path, space=KEEPING, trials=4)
    tuning.run()
    tuning.events.clear()
    left = list(paces)

    def paced(runner: object, point: Point, recipe: Recipe, **_: object) -> Outcome:
        assert point == {**tuning.baseline, KEEP_MEMORY: True}
        pace = left.pop(0)
        return ran_at(point, pace * rate(point)) if pace else Outcome(point, Status.TIMEOUT)

    monkeypatch.setattr(search_loop, "run_trial", paced)
    runner = SimpleNamespace(pids=(), load=lambda: None)
    tuning.search.measure_since_resume(cast(Any, runner))
    assert left == []
    assert (tuning.study.history() == ()) is bool(said)
    assert said in " ".join(tuning.notes)
    assert bool(said) is bool(tuning.notes)


def test_a_new_study_is_not_anchored(tmp_path: Path) -> None:
    tuning = Tuning(tmp_path)
    tuning.search.measure_since_resume(cast(Any, None))
    assert tuning.events == []


@pytest.mark.parametrize(
    ("space", "of_large", "largest", "crowded"),
    [(SPACE, 1.0, 512, []), (KEEPING, 1.0, 256, []), (KEEPING, 1.5, 128, [256])],
)
def test_where_memory_is_kept_a_recipe_leaves_as_much_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    space: Space,
    of_large: float,
    largest: int,
    crowded: list[int],
) -> None:
    """Some take more than could be foreseen."""

    def growing(runner: object, point: Point, recipe: Recipe, **_: object) -> Outcome:
        batch = int(point[BATCH])
        peak = batch * (of_large if batch >= 256 else 1.0)
        return ran_at(point, 100.0 * batch, peak_memory_bytes=int(peak))

    monkeypatch.setattr(search_loop, "run_trial", growing)
    tuning = Tuning(tmp_path, space=space, memory_bytes=700)
    tuning.run()
    fastest = max(tuning.history, key=lambda outcome: outcome.rate)
    assert fastest.point[BATCH] == largest
    too_large = {o.point[BATCH] for o in tuning.history if o.status is Status.WOULD_NOT_FIT}
    assert sorted(too_large) == crowded


@pytest.mark.parametrize("sampler", ["cost", "grid"])
def test_no_trial_begins_that_would_not_end_in_its_share_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    """Trials of 40 s, of which 35 s are setup; the search's share is 90 s."""
    tuning = Tuning(tmp_path, sampler=sampler, time_limit=200.0)
    tuning.limit(200.0)

    def slow(runner: object, point: Point, recipe: Recipe, **_: object) -> Outcome:
        tuning.now += 40.0
        return ran_at(point, float(point[BATCH]), warmup_seconds=35.0)

    monkeypatch.setattr(search_loop, "run_trial", slow)
    tuning.run()
    assert len(tuning.history) == 2
    assert "recipes the search had no time to try" in tuning.search.not_covered
    assert tuning.notes[-1].endswith(
        "no further trial would end within its share of the time limit"
    )


@pytest.mark.parametrize(("faster", "trials"), [(2.0, 4), (0.5, 5)])
def test_the_search_ends_earlier_where_the_check_needs_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: float, trials: int
) -> None:
    """86 steps of float32, of half a second, end within 80 s if they begin before 37 s.

    What is slower than float32 is not checked, and the search has its 45 s.
    """
    space = replace(SPACE, batch_sizes=(32, 64))
    tuning = Tuning(tmp_path, space, sampler="grid", time_limit=100.0)
    tuning.limit(100.0)

    def slow(runner: object, point: Point, recipe: Recipe, **_: object) -> Outcome:
        tuning.now += 10.0
        speed = faster if recipe.policy.mixed else 1.0
        plain = recipe.memory_format == "contiguous"
        return ran_at(point, 64.0 * (speed if plain else 0.9), warmup_seconds=0.5)

    monkeypatch.setattr(search_loop, "run_trial", slow)
    tuning.run()
    assert len(tuning.history) == trials
