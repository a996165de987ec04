"""The choice among proven finalists, and the winner's speed over the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
from factories import steady

from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.selection import Finalist
from autoprec.errors import TaskError
from autoprec.tuning.race import interleaved_timing
from autoprec.tuning.race.interleaved_timing import SelectRemaining, keep_all
from autoprec.tuning.stage_results import (
    REFERENCE,
    ConfirmationResult,
    FinalistLost,
    SearchResult,
)
from autoprec.tuning.time_limit import Deadline
from tests.tuning.fake_timing import (
    COMPILED,
    FAST,
    JOB,
    PLAIN,
    FakeTiming,
    at,
    attempt,
    confirmed,
    loaded,
    proven,
    raced,
    searched,
)


def test_another_recipe_takes_the_place_of_one_that_fails(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTiming, "failing", (FAST[64].key(),))
    lost = attempt(search, [proven(FAST[64])])
    assert isinstance(lost, FinalistLost)
    assert lost.recipe == FAST[64]
    assert "failed in the confirmation" in lost.reason
    result = attempt(search, [proven(FAST[32])], lost)
    assert isinstance(result, ConfirmationResult)
    assert result.choice.recipe == FAST[32]


def test_the_rounds_before_a_failure_are_kept(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The winner runs beside its rivals and fails when it is measured; then the time is over."""
    contests: list[Sequence[Recipe]] = []

    class Failing(FakeTiming):
        def run(self, rounds: int, running: SelectRemaining = keep_all) -> tuple[Finalist, ...]:
            self.failing = (FAST[64].key(),) if contests else ()
            contests.append(self.recipes)
            return super().run(rounds, running)

    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Failing)
    lost = attempt(with_close_rival(search), [proven(FAST[64])])
    assert isinstance(lost, FinalistLost)
    raced = (PLAIN, FAST[64], replace(PLAIN, batch_size=64))
    assert lost.measured.keys() == {recipe.key() for recipe in raced}
    monkeypatch.setattr(JOB, "deadline", Deadline(0.0, 1.0, lambda: 2.0))
    late = attempt(search, [proven(FAST[32])], lost)
    assert isinstance(late, ConfirmationResult)
    assert late.measured == lost.measured


def test_where_nothing_takes_its_place_the_baseline_is_the_answer(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTiming, "failing", (FAST[64].key(),))
    lost = attempt(search, [proven(FAST[64])])
    assert isinstance(lost, FinalistLost)
    result = attempt(search, [], lost)
    assert isinstance(result, ConfirmationResult)
    assert result.choice.recipe == PLAIN


def test_a_baseline_that_fails_now_ends_the_tuning(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTiming, "failing", (PLAIN.key(),))
    with pytest.raises(TaskError, match="baseline ran before but failed"):
        confirmed(search, [proven(FAST[32])])


def test_a_float32_winner_with_other_settings_is_compared_at_its_own_batch(
    search: SearchResult,
) -> None:
    """Otherwise nobody could tell whether the larger batch or the compiler helped."""
    result = confirmed(search, [proven(COMPILED)])
    assert result.over_baseline is not None
    assert result.over_baseline.ratio == pytest.approx(2.4)
    assert result.at_same_batch is not None
    assert result.at_same_batch.ratio == pytest.approx(1.2)
    assert [(p.what, round(p.speedup.ratio, 6)) for p in result.waterfall] == [
        ("compiled", 1.2),
        ("batch", 2.0),
    ]


def test_a_larger_batch_alone_has_no_other_float32_to_be_compared_with(
    search: SearchResult,
) -> None:
    result = confirmed(search, [proven(replace(PLAIN, batch_size=64))])
    assert result.over_baseline is not None
    assert result.at_same_batch is None


class Disturbed(FakeTiming):
    """In the first round a neighbour slows all but the baseline."""

    def finals(self, rounds: int) -> tuple[Finalist, ...]:
        return tuple(
            replace(f, rates=(f.rates[0] / 4, *f.rates[1:])) if f.recipe != PLAIN else f
            for f in super().finals(rounds)
        )


def test_one_disturbed_round_does_not_make_a_fast_recipe_lose(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Disturbed)
    result = confirmed(search, [proven(FAST[64]), replace(proven(FAST[32]), rate=620.0)])
    assert result.choice.recipe == FAST[64]
    assert result.over_baseline is not None
    assert result.over_baseline.rounds == 5  # it is surely faster, if not known by how much


def test_who_loses_the_lead_in_further_rounds_is_not_measured_to_the_end(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rounds of five were faster by 20 %, then none."""

    class Fading(FakeTiming):
        def finals(self, rounds: int) -> tuple[Finalist, ...]:
            luck = (1.2, 1.2, 0.7, 1.2, 1.2, *(0.8,) * rounds)[:rounds]
            return tuple(Finalist(r, (1.0,) * rounds if r == PLAIN else luck) for r in self.recipes)

    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Fading)
    search = searched((PLAIN, 1.0), (FAST[32], 1.2))
    result = confirmed(search, [proven(FAST[32])])
    assert result.choice.recipe == PLAIN
    assert result.choice.ratio.rounds == 9


def test_finalists_that_are_all_slower_are_not_measured_again(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTiming, "rate", staticmethod(lambda r: 1.0 if r.policy.mixed else 2.0))
    asked: list[int] = []
    plainly = FakeTiming.run

    def run(self: FakeTiming, rounds: int, running: SelectRemaining) -> tuple[Finalist, ...]:
        asked.append(rounds)
        return plainly(self, rounds, running)

    monkeypatch.setattr(FakeTiming, "run", run)
    result = confirmed(search, [proven(FAST[64]), proven(FAST[32])])
    assert result.choice.recipe == PLAIN
    assert len(asked) == 1


class Useless(FakeTiming):
    """Precision brings nothing, and another setting less than that."""

    @staticmethod
    def rate(recipe: Recipe) -> float:
        return recipe.batch_size * (0.91 if recipe.policy.mixed or recipe.compile else 1.0)


@pytest.mark.parametrize("winner", [FAST[64], COMPILED])
def test_what_plain_float32_beats_at_its_own_batch_is_not_the_result(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch, winner: Recipe
) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Useless)
    search = at(Useless)
    result = confirmed(search, [proven(winner)])
    assert result.proven is not None
    assert result.proven.recipe == replace(PLAIN, batch_size=64)
    assert result.proven.verdict == REFERENCE
    assert [(p.what, p.speedup.ratio) for p in result.waterfall] == [("batch", 2.0)]
    assert result.at_same_batch is None


@pytest.mark.usefixtures("forced")
def test_a_forced_recipe_that_is_slower_by_far_is_not_measured_again(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTiming, "__enter__", None)  # no contest may begin
    search = searched((PLAIN, 320.0), (FAST[32], 3.2))
    result = confirmed(search, [proven(FAST[32])])
    assert result.proven is not None
    assert result.over_baseline is not None
    assert (result.over_baseline.ratio, result.over_baseline.rounds) == (pytest.approx(0.01), 1)


@pytest.mark.usefixtures("forced")
def test_a_forced_recipe_that_is_surely_slower_takes_three_rounds(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", loaded(0.81, 0.8, 0.82))
    search = searched((PLAIN, 320.0), (FAST[32], 260.0))
    result = confirmed(search, [proven(FAST[32])])
    assert result.proven is not None
    assert result.over_baseline is not None
    assert (result.over_baseline.ratio, result.over_baseline.rounds) == (
        pytest.approx(0.81, abs=0.01),
        3,
    )


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("islands", [(), ("head",)])
def test_a_forced_recipe_that_cannot_be_confirmed_in_time_is_taken_as_the_search_saw_it(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch, islands: tuple[str, ...]
) -> None:
    """One with islands has no trial of the search's own, but was timed with them."""
    monkeypatch.setattr(JOB, "deadline", Deadline(0.0, 1.0, lambda: 2.0))
    search = searched((PLAIN, 320.0), (FAST[32], 400.0))
    recipe = replace(FAST[32], float32_modules=islands)
    result = confirmed(search, [replace(proven(recipe), rate=400.0)])
    assert result.proven is not None
    assert result.proven.recipe == recipe
    assert result.over_baseline == Ratio(1.25, 1.25, 1.25, 1)
    assert result.not_covered


@pytest.mark.parametrize(("each", "rounds"), [(100.0, 0), (60.0, 1), (40.0, 2), (30.0, 3)])
def test_what_there_was_no_time_to_confirm_is_not_chosen(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch, each: float, rounds: int
) -> None:
    """So long takes each round of a limit of 100 s; three tell something, fewer nothing."""
    readings = iter([100.0 if rounds == 0 else 0.0, *(each * ran for ran in range(1, 100))])
    monkeypatch.setattr(FakeTiming, "round_seconds", each)
    monkeypatch.setattr(JOB, "deadline", Deadline(0.0, 100.0, lambda: next(readings)))
    result = confirmed(search, [proven(FAST[32])])
    in_time = rounds >= 3
    assert result.choice.recipe == (FAST[32] if in_time else PLAIN)
    assert bool(result.not_covered) is not in_time
    assert in_time or "no time left to confirm" in result.choice.reason


def with_close_rival(search: SearchResult) -> SearchResult:
    """The search, with float32 at the winner's batch two thirds as fast as the winner."""
    rate = FakeTiming.rate(FAST[64]) / 1.5
    history = tuple(
        replace(o, measurement=steady(64 / rate, 64.0))
        if search.trials.space.recipe(o.point).key() == ALIKE.key()
        else o
        for o in search.trials.history
    )
    return replace(search, trials=replace(search.trials, history=history))


class Contests(FakeTiming):
    """Remembers who ran, in this test."""

    seen: ClassVar[list[tuple[Recipe, ...]]] = []

    def __init__(self, recipes: Sequence[Recipe], *_: object, **__: object) -> None:
        super().__init__(recipes)
        Contests.seen.append(tuple(recipes))


@pytest.fixture
def contests(search: SearchResult, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recipe, ...]]:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Contests)
    monkeypatch.setattr(Contests, "seen", [])
    return Contests.seen


ALIKE = replace(PLAIN, batch_size=64)


def test_where_the_winner_raced_beside_its_rivals_the_choice_is_known(
    search: SearchResult, contests: list[tuple[Recipe, ...]]
) -> None:
    result = confirmed(raced(search, FakeTiming, PLAIN, FAST[64], ALIKE), [proven(FAST[64])])
    assert contests == [(PLAIN, FAST[64], ALIKE)]  # with what its speedup consists of
    assert result.choice.recipe == FAST[64]


def test_where_another_was_proven_than_raced_beside_its_rivals_it_does_so_now(
    search: SearchResult, contests: list[tuple[Recipe, ...]]
) -> None:
    far = replace(FAST[64], batch_size=16)
    race = raced(with_close_rival(search), FakeTiming, PLAIN, far, FAST[64])
    result = confirmed(race, [proven(FAST[64])])
    assert contests == [(PLAIN, FAST[64], ALIKE)] * 2
    assert result.choice.recipe == FAST[64]


def test_a_rival_that_was_far_slower_in_the_search_does_not_race(
    search: SearchResult, contests: list[tuple[Recipe, ...]]
) -> None:
    far = replace(FAST[64], batch_size=16)
    result = confirmed(raced(search, FakeTiming, PLAIN, far, FAST[64]), [proven(FAST[64])])
    assert contests == [(PLAIN, FAST[64], ALIKE)]
    assert result.choice.recipe == FAST[64]


def test_what_a_setting_brings_at_twice_or_half_the_batch_stands_for_it(
    search: SearchResult, contests: list[tuple[Recipe, ...]]
) -> None:
    """Plain float32 ran at half the batch of the winner, and so did the winner's policy."""
    race = raced(search, FakeTiming, PLAIN, FAST[32], FAST[64])
    result = confirmed(race, [proven(FAST[64])])
    assert contests == [(PLAIN, FAST[64], ALIKE)]
    assert result.choice.recipe == FAST[64]
    plain, small, winner = race.finalists
    larger = replace(winner, rates=tuple(2 * rate for rate in plain.rates))
    useless = replace(race, finalists=(plain, replace(small, rates=plain.rates), larger))
    assert confirmed(useless, [proven(FAST[64])]).choice.recipe == ALIKE


def test_a_rival_that_was_out_before_the_winner_is_not_chosen(
    search: SearchResult, contests: list[tuple[Recipe, ...]]
) -> None:
    """Lucky in fewer rounds."""
    search = raced(search, Useless, PLAIN, FAST[64], ALIKE)
    plain, winner, alike = search.finalists
    longer = [replace(each, rates=each.rates * 2) for each in (plain, winner)]
    result = confirmed(replace(search, finalists=(*longer, alike)), [proven(FAST[64])])
    assert result.choice.recipe == FAST[64]
    assert len(contests) == 1


def test_a_race_that_shows_no_gain_ends_it(
    search: SearchResult, contests: list[tuple[Recipe, ...]]
) -> None:
    search = raced(search, FakeTiming, PLAIN, FAST[32])
    plain, winner = search.finalists
    result = confirmed(
        replace(search, finalists=(plain, replace(winner, rates=plain.rates))), [proven(FAST[32])]
    )
    assert result.choice.recipe == PLAIN
    assert contests == []


def test_the_ratio_comes_from_rounds_after_the_choice(
    search: SearchResult, contests: list[tuple[Recipe, ...]]
) -> None:
    search = raced(search, FakeTiming, PLAIN, FAST[64], ALIKE)
    lucky = [replace(f, rates=tuple(1.1 * r for r in f.rates)) for f in search.finalists[1:]]
    result = confirmed(replace(search, finalists=(search.finalists[0], *lucky)), [proven(FAST[64])])
    assert result.over_baseline is not None
    assert result.over_baseline.ratio == pytest.approx(4.0)


def test_a_gain_in_the_race_that_is_gone_when_it_is_measured_is_inconclusive(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever slowed the baseline in search and race may come back, or have gone for good."""
    search = raced(searched((PLAIN, 32.0), (FAST[32], 64.0)), FakeTiming, PLAIN, FAST[32])
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", loaded(1.0))
    result = confirmed(search, [proven(FAST[32])])
    assert result.choice.recipe == PLAIN
    assert "the comparison saw 2.00x" in result.inconclusive


@pytest.mark.usefixtures("contests")
def test_a_baseline_that_raced_at_another_pace_than_it_was_searched_at_is_inconclusive(
    search: SearchResult,
) -> None:
    """Whether or not anything else was left to be confirmed."""
    search = raced(searched((PLAIN, 9985.0), (FAST[32], 448.0)), FakeTiming, PLAIN, FAST[32])
    result = confirmed(search, [])
    assert result.choice.recipe == PLAIN
    assert "float32, batch 32 ran at 9985 samples/s in the search" in result.inconclusive


@pytest.mark.parametrize(("on_cpu", "rounds"), [(True, SPEED.min_rounds), (False, 5)])
def test_rounds_are_saved_where_each_costs_processes(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch, on_cpu: bool, rounds: int
) -> None:
    monkeypatch.setattr(JOB, "on_cpu", on_cpu)
    result = confirmed(search, [proven(FAST[32])])
    assert result.over_baseline is not None
    assert result.over_baseline.rounds == rounds == min(rounds, JOB.options.rounds)
