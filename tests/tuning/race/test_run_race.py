"""The race before the proofs: who runs, what its rounds tell, and what failures do to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.errors import TaskError
from autoprec.tuning.race import interleaved_timing
from autoprec.tuning.race.run_race import run_race
from autoprec.tuning.stage_results import SearchResult
from autoprec.tuning.study.notes import StudyNote
from autoprec.tuning.time_limit import SEARCH_SHARE, SECOND_SEARCH_SHARE, Deadline
from tests.tuning.fake_timing import FAST, JOB, PLAIN, RUNNER, FakeTiming, searched

FLOAT32 = replace(PLAIN, batch_size=64)


class Racing(FakeTiming):
    """Remembers who ran."""

    contests: ClassVar[list[list[Recipe]]] = []

    def __init__(self, recipes: Sequence[Recipe], *_: object, **__: object) -> None:
        super().__init__(recipes)
        Racing.contests.append(list(recipes))


@pytest.fixture(autouse=True)
def contests(monkeypatch: pytest.MonkeyPatch) -> list[list[Recipe]]:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Racing)
    monkeypatch.setattr(FakeTiming, "failing", ())
    monkeypatch.setattr(Racing, "contests", [])
    monkeypatch.setattr(JOB.options, "policies", (), raising=False)
    return Racing.contests


class Notes:
    """A study that keeps what it is told, as it would read it again."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def remember(self, note: StudyNote[Any], value: object) -> None:
        self.kept[note.name] = to_plain(value)

    def recall(self, note: StudyNote[Any]) -> Any:
        return from_plain(note.kind, self.kept[note.name]) if note.name in self.kept else None


def race(search: SearchResult, notes: Notes | None = None) -> SearchResult:
    return run_race(JOB, cast(Any, notes or Notes()), search, cast(Any, RUNNER))


#: The search took the smaller batch for the faster one, and the baseline for slower than it is.
MISLED = searched((PLAIN, 20.0), (FAST[32], 100.0), (FAST[64], 95.0))


def test_the_truly_fastest_leads_and_the_baseline_ran_beside_it(
    contests: list[list[Recipe]],
) -> None:
    found = race(MISLED)
    assert contests == [[PLAIN, FAST[32], FAST[64]]]
    rates = {MISLED.trials.space.recipe(o.point).key(): o.rate for o in found.ranking}
    assert rates[FAST[64].key()] / rates[FAST[32].key()] == pytest.approx(2.0)
    assert found.baseline_outcome.rate / rates[FAST[32].key()] == pytest.approx(0.5)
    assert [final.recipe for final in found.finalists] == [PLAIN, FAST[32], FAST[64]]
    assert found.measured.keys() == {each.key() for each in (PLAIN, *FAST.values())}
    assert found.trials is MISLED.trials


def test_the_fastest_runs_without_its_settings_and_in_float32(
    contests: list[list[Recipe]],
) -> None:
    search = searched((PLAIN, 20.0), (FAST[64], 100.0))
    race(search)
    assert contests == [[PLAIN, FAST[64], FLOAT32]]


def test_what_fails_is_refused_and_the_others_race_without_it(
    contests: list[list[Recipe]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTiming, "failing", (FAST[32].key(),))
    found = race(MISLED)
    assert contests[1] == [PLAIN, FAST[64], FLOAT32]
    assert [refusal.candidate for refusal in found.refusals] == ["mixed_bfloat16"]
    assert "failed during the comparison with others" in found.refusals[0].reason
    lost = [o.rate for o in found.ranking if MISLED.trials.space.recipe(o.point) == FAST[32]]
    assert lost == [0.0]


def test_a_rival_that_fails_is_left_out_and_refuses_nothing(
    contests: list[list[Recipe]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTiming, "failing", (FLOAT32.key(),))
    found = race(searched((PLAIN, 20.0), (FAST[64], 100.0)))
    assert contests[1] == [PLAIN, FAST[64]]
    assert found.refusals == ()


def test_a_baseline_that_fails_ends_the_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTiming, "failing", (PLAIN.key(),))
    with pytest.raises(TaskError, match="baseline ran before but failed"):
        race(MISLED)


def test_without_time_or_without_rivals_the_search_stands(
    contests: list[list[Recipe]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = searched((PLAIN, 20.0))
    assert race(alone) == alone
    monkeypatch.setattr(JOB, "deadline", Deadline(0.0, 1.0, lambda: 2.0))
    assert race(MISLED) == MISLED
    assert contests == []


def test_policies_that_were_not_asked_for_do_not_race(
    contests: list[list[Recipe]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JOB.options, "policies", (Policy.FLOAT32,))
    race(searched((PLAIN, 20.0), (FAST[64], 100.0), (FLOAT32, 40.0)))
    assert contests == [[PLAIN, FLOAT32]]


def test_the_time_limit_ends_it_between_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds were expected to end before 45 seconds have passed."""
    readings = iter([0.0, 0.0, 44.0, 46.0])
    monkeypatch.setattr(JOB, "deadline", Deadline(0.0, 100.0, lambda: next(readings)))
    found = race(MISLED)
    assert [len(final.rates) for final in found.finalists] == [2] * 3


@pytest.mark.parametrize(("before", "rounds"), [(40.0, 2), (20.0, 3)])
def test_a_round_that_would_not_end_in_time_does_not_begin(
    monkeypatch: pytest.MonkeyPatch, before: float, rounds: int
) -> None:
    """Each takes ten seconds."""
    monkeypatch.setattr(FakeTiming, "round_seconds", 10.0)
    readings = iter([0.0, 0.0, before - 10.0, before, before + 10.0])
    monkeypatch.setattr(JOB, "deadline", Deadline(0.0, 100.0, lambda: next(readings)))
    found = race(MISLED)
    assert [len(final.rates) for final in found.finalists] == [rounds] * 3


@pytest.mark.parametrize(
    ("left", "racing"),
    [
        pytest.param(100.0, (PLAIN, FAST[32], FAST[64]), id="time for all"),
        pytest.param(7.0, (PLAIN, FAST[32]), id="time for two"),
        pytest.param(2.0, (), id="time for none"),
    ],
)
def test_as_many_race_as_have_time_for_three_rounds(
    monkeypatch: pytest.MonkeyPatch,
    contests: list[list[Recipe]],
    left: float,
    racing: tuple[Recipe, ...],
) -> None:
    monkeypatch.setattr(JOB, "deadline", Deadline(0.0, left / SEARCH_SHARE, lambda: 0.0))
    race(MISLED)
    assert [tuple(each) for each in contests] == ([racing] if racing else [])


def test_a_stopped_tuning_does_not_race_again_unless_it_searched_since(
    contests: list[list[Recipe]],
) -> None:
    notes = Notes()
    found = race(MISLED, notes)
    again = race(MISLED, notes)
    assert len(contests) == 1
    assert (again.ranking, again.measured) == (found.ranking, found.measured)
    assert [each.recipe for each in again.finalists] == [each.recipe for each in found.finalists]
    assert [each.rates for each in again.finalists] == [(32.0,), (64.0,), (128.0,)]
    more = searched((PLAIN, 20.0), (FAST[32], 100.0), (FAST[64], 95.0), (FLOAT32, 40.0))
    assert len(race(more, notes).ranking) == 4
    assert len(contests) == 2


@pytest.mark.parametrize(("share", "races"), [(SEARCH_SHARE, 0), (SECOND_SEARCH_SHARE, 1)])
def test_what_a_second_search_found_races_in_its_own_time(
    contests: list[list[Recipe]], monkeypatch: pytest.MonkeyPatch, share: float, races: int
) -> None:
    """Half of the limit has passed."""
    monkeypatch.setattr(JOB, "deadline", Deadline(0.0, 100.0, lambda: 50.0))
    run_race(JOB, cast(Any, Notes()), MISLED, cast(Any, RUNNER), share)
    assert len(contests) == races
