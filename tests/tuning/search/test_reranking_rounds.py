"""Re-ranking: rates that the search measured wrongly are corrected before anything is proven."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from factories import ran_at

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.recipe import Recipe
from autoprec.core.speed import best_arm
from autoprec.core.speed.reranking import SEARCH_RATIO_ERROR, Reranking
from autoprec.core.speed.selection import Finalist
from autoprec.core.speed.space import BATCH, Space
from autoprec.core.speed.trial_results import Outcome
from autoprec.tuning.confirmation import interleaved_timing
from autoprec.tuning.confirmation.interleaved_timing import (
    SelectRemaining,
    keep_all,
)
from autoprec.tuning.confirmation.sessions import FinalistFailed
from autoprec.tuning.events import silent
from autoprec.tuning.search.reranking_rounds import RerankingResult, recall_reranking, rerank
from autoprec.tuning.search.trials import Trials
from autoprec.tuning.time_limit import Deadline
from autoprec.workers.failures import FailureKind, WorkerFailure

SPACE = Space(policies=(Policy.FLOAT32, Policy.MIXED_BFLOAT16), batch_sizes=(16, 32, 64, 128))

RUNNER = SimpleNamespace(drop=lambda: None)

#: Samples per second by batch, under bfloat16: what the search saw, and what is true.
SEEN = {16: 400.0, 32: 950.0, 64: 1000.0, 128: 980.0}
TRUE = {16: 400.0, 32: 700.0, 64: 900.0, 128: 1100.0}


class Rounds:
    """A contest in which everybody runs as fast as is true."""

    failing: tuple[int, ...] = ()
    ran: ClassVar[list[list[int]]] = []
    lengths: ClassVar[list[list[int]]] = []

    def __init__(self, recipes: Sequence[Recipe], *_: object, **__: object) -> None:
        self.recipes = recipes
        self.measured: list[list[Measurement]] = [[] for _ in recipes]
        Rounds.ran.append([recipe.batch_size for recipe in recipes])

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, rounds: int, running: SelectRemaining = keep_all) -> tuple[Finalist, ...]:
        for recipe in self.recipes:
            if recipe.batch_size in self.failing:
                raise FinalistFailed(recipe, WorkerFailure(FailureKind.OUT_OF_MEMORY, "no room"))
        lengths = [0] * len(self.recipes)
        on: Collection[int] = range(len(lengths))
        for _ in range(rounds):
            for index in on:
                lengths[index] += 1
            finals = tuple(
                Finalist(r, (TRUE[r.batch_size],) * n)
                for r, n in zip(self.recipes, lengths, strict=True)
            )
            on = running(finals)
            if not on:
                break
        Rounds.lengths.append(lengths)
        return finals


class Notes:
    """A study that keeps what it is told."""

    def __init__(self) -> None:
        self.kept: dict[str, object] = {}

    def remember(self, name: str, value: object) -> None:
        self.kept[name] = value

    def recall(self, name: str, kind: type) -> Any:
        return self.kept.get(name)


@pytest.fixture(autouse=True)
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Rounds)
    monkeypatch.setattr(Rounds, "failing", ())
    monkeypatch.setattr(Rounds, "ran", [])
    monkeypatch.setattr(Rounds, "lengths", [])


def seen(batch: int, policy: str, rate: float) -> Outcome:
    point = {**next(iter(SPACE.points())), "policy": policy, BATCH: batch}
    return ran_at(point, rate, peak_memory_bytes=1)


def searched(scale: float = 1.0) -> Trials:
    history = [seen(32, "float32", 300.0 * scale)]
    history += [seen(batch, "mixed_bfloat16", rate * scale) for batch, rate in SEEN.items()]
    facts = TaskFacts("torch", {}, 32, 32, 1000)
    return Trials(facts, SPACE, tuple(history))


def slow_to_start(trials: Trials, seconds: float) -> Trials:
    history = tuple(
        replace(o, measurement=replace(cast(Measurement, o.measurement), warmup_seconds=seconds))
        for o in trials.history
    )
    return replace(trials, history=history)


def job(policies: tuple[Policy, ...] = ()) -> Any:
    options = SimpleNamespace(seed=0, policies=policies)
    return SimpleNamespace(
        options=options,
        listener=silent,
        memory_bytes=None,
        runner=None,
        contention_monitor=None,
        on_cpu=True,
        deadline=Deadline(),
    )


def result_of(
    trials: Trials, before: Reranking | None = None, notes: Notes | None = None, **kwargs: Any
) -> RerankingResult:
    baseline = trials.history[0].point
    study, runner = cast(Any, notes or Notes()), cast(Any, RUNNER)
    return rerank(job(**kwargs), study, baseline, trials, before or Reranking(), runner)


def run(trials: Trials, before: Reranking | None = None, **kwargs: Any) -> Reranking:
    return result_of(trials, before, **kwargs).reranking


def rank(trials: Trials, **kwargs: Any) -> dict[int, Outcome]:
    return by_batch(run(trials, **kwargs).ranking(trials.history))


def by_batch(outcomes: Sequence[Outcome]) -> dict[int, Outcome]:
    return {int(o.point[BATCH]): o for o in outcomes if o.point["policy"] == "mixed_bfloat16"}


def test_the_truly_fastest_leads_and_the_others_stay_as_they_were() -> None:
    ranking = rank(searched())
    assert Rounds.ran == [[64, 128, 32]]
    assert max(ranking, key=lambda batch: ranking[batch].rate) == 128
    assert ranking[128].rate / ranking[64].rate == pytest.approx(1100 / 900)
    assert ranking[16].rate == 400.0


def test_rates_stay_on_the_searches_scale() -> None:
    """Or a machine that is faster now would flatter whoever ran again."""
    ranking = rank(searched(scale=0.5))
    product = ranking[32].rate * ranking[64].rate * ranking[128].rate
    assert product == pytest.approx(475.0 * 500.0 * 490.0)


def test_what_fails_now_is_out_and_the_rest_run_without_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(Rounds, "failing", (128,))
    found = searched()
    result = result_of(found)
    assert Rounds.ran == [[64, 128, 32], [64, 32]]
    assert by_batch(result.reranking.ranking(found.history))[128].rate == 0.0
    assert "failed during the comparison with others" in result.refusals[0].reason
    assert len(result.measured) == 2


def test_one_that_leads_by_far_is_not_re_ranked() -> None:
    found = searched()
    found = replace(found, history=found.history[:2])
    rank(found)
    assert Rounds.ran == []


@pytest.mark.parametrize(("second", "ran"), [(850.0, [[64, 128]]), (590.0, [])])
def test_one_that_leads_alone_runs_beside_the_second_unless_that_is_far_behind(
    second: float, ran: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lead of a fifth may be luck."""
    monkeypatch.setitem(SEEN, 32, 700.0)
    monkeypatch.setitem(SEEN, 128, second)
    ranking = rank(searched())
    assert Rounds.ran == ran
    assert max(ranking, key=lambda batch: ranking[batch].rate) == (128 if ran else 64)


def test_who_was_slower_than_all_others_foresee_runs_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the scale is that of the others: what slowed it says nothing of them."""
    monkeypatch.setitem(SEEN, 32, 700.0)
    monkeypatch.setitem(SEEN, 64, 1000.0)
    monkeypatch.setitem(SEEN, 128, 790.0)
    ranking = rank(slow_to_start(searched(), 2.0))  # too slow for what 790 promises by itself
    assert Rounds.ran == [[64, 128]]
    assert ranking[64].rate == pytest.approx(1000.0)
    assert ranking[128].rate == pytest.approx(1000.0 * 1100 / 900)


def test_steps_too_dear_for_rounds_leave_the_searches_word() -> None:
    found = searched(scale=0.005)
    assert rank(found)[64].rate == 5.0
    assert Rounds.ran == []


def test_where_not_all_fit_into_the_time_the_fastest_do() -> None:
    """With steps of seconds only two of three recipes can run three rounds."""
    found = searched(scale=0.02)
    rank(found)
    assert Rounds.ran == [[64, 128]]


@pytest.mark.parametrize(
    ("warmup", "ran"), [({128: 40.0}, [[64, 32]]), ({128: 25.0, 32: 5.0}, [[64, 128]])]
)
def test_who_takes_too_long_to_make_ready_keeps_no_quick_one_out(
    warmup: dict[int, float], ran: list[list[int]]
) -> None:
    """30 s are there: of those that fit together, who promises most runs."""
    found = searched()
    history = tuple(
        replace(o, measurement=replace(m, warmup_seconds=warmup.get(int(o.point[BATCH]), 0.0)))
        for o in found.history
        if (m := o.measurement)
    )
    found = replace(found, history=history)
    rank(found)
    assert Rounds.ran == ran


def test_the_baseline_runs_in_the_finish_and_not_here() -> None:
    found = searched()
    found = replace(found, history=(seen(32, "float32", 990.0), *found.history[1:]))
    rank(found)
    assert Rounds.ran == [[64, 128, 32]]


def test_the_race_is_over_when_a_round_costs_more_than_it_can_bring() -> None:
    rank(searched())
    assert Rounds.lengths == [[3, 3, 3]]


def test_the_race_is_over_when_the_time_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 3.2 and 6.5 s: four rounds take 39 s at least, three fit into 30."""
    monkeypatch.setattr(best_arm, "select_contenders", lambda rates, seconds: range(len(rates)))
    rank(searched(scale=0.02))
    assert Rounds.lengths == [[4, 4]]


def test_only_policies_that_may_be_chosen_run() -> None:
    rank(searched(), policies=(Policy.FLOAT32,))
    assert Rounds.ran == []


def test_without_a_recipe_that_ran_nothing_is_re_ranked() -> None:
    """A forced policy of which every trial failed is for the proof's stage to refuse."""
    rank(searched(), policies=(Policy.MIXED_FLOAT16,))
    assert Rounds.ran == []


def test_what_they_came_to_is_kept_with_the_trials_that_were_known() -> None:
    notes, found = Notes(), searched()
    reranked = run(found, notes=notes)
    assert reranked.trials == len(found.history)
    assert recall_reranking(cast(Any, notes)) == reranked
    assert recall_reranking(cast(Any, Notes())) == Reranking()
    run(found, before=reranked)
    assert len(Rounds.ran) == 1  # a stopped tuning does not run them again


def test_a_newcomer_runs_against_the_winner_alone_and_on_its_scale() -> None:
    found = searched()
    everything = found.history
    found = replace(found, history=everything[:-1])
    first = run(found)
    found = replace(found, history=everything)
    ranking = by_batch(run(found, before=first).ranking(everything))
    assert Rounds.ran == [[64, 32], [64, 128]]
    before = by_batch(first.ranking(everything))
    assert ranking[32] == before[32]
    assert ranking[64].rate == pytest.approx(before[64].rate)
    assert ranking[128].rate == pytest.approx(before[64].rate * 1100 / 900)


def test_a_newcomer_that_is_far_behind_is_not_timed_again() -> None:
    found = searched()
    first = run(found)
    found = replace(found, history=(*found.history, seen(8, "mixed_bfloat16", 300.0)))
    reranked = run(found, before=first)
    assert len(Rounds.ran) == 1
    assert (reranked.ran, reranked.trials) == (first.ran, first.trials + 1)


def test_where_the_search_erred_by_much_who_seemed_too_slow_runs_once_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 and 128 came out at 0.7 and 1.2 times what the search saw: so may 32 have been slowed."""
    monkeypatch.setitem(SEEN, 32, 600.0)
    monkeypatch.setitem(TRUE, 64, 700.0)
    monkeypatch.setitem(TRUE, 128, 1200.0)
    monkeypatch.setitem(TRUE, 32, 1300.0)
    found = searched()
    first = run(found)
    assert first.luck == pytest.approx(math.log(1200 / 980 / (700 / 1000)))
    second = run(found, before=first)
    assert Rounds.ran == [[64, 128], [128, 32, 16]]
    ranking = by_batch(second.ranking(found.history))
    assert ranking[32].rate == pytest.approx(ranking[128].rate * 1300 / 1200)
    assert second.luck == SEARCH_RATIO_ERROR
    assert run(found, before=second) == second


def test_who_is_too_slow_even_for_that_does_not_run() -> None:
    found = searched()
    found = replace(found, history=tuple(o for o in found.history if o.point[BATCH] != 128))
    first = run(found)
    assert run(found, before=first) == replace(first, luck=SEARCH_RATIO_ERROR)
    assert Rounds.ran == [[64, 32]]


def test_where_the_confirmation_belies_the_search_all_that_may_be_faster_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the winner, not against the baseline, which is now known to be faster than it."""
    sizes = tuple(2**n for n in range(4, 12))
    for batch in sizes:
        monkeypatch.setitem(SEEN, batch, {512: 1000.0, 1024: 950.0}.get(batch, 700.0))
        monkeypatch.setitem(TRUE, batch, {512: 1000.0, 1024: 950.0, 64: 1300.0}.get(batch, 900.0))
    found = searched()
    first = run(found)
    assert Rounds.ran == [[512, 1024]]
    doubted = first.doubted(found.history[0], math.log(5.0))
    assert doubted.ranking(found.history)[0].rate == pytest.approx(5 * 300.0)
    second = run(found, before=doubted)
    assert Rounds.ran[1][0] == 512
    assert sorted(Rounds.ran[1][1:]) == sorted({*sizes} - {512, 1024})
    ranking = by_batch(second.ranking(found.history))
    assert max(ranking, key=lambda batch: ranking[batch].rate) == 64
    assert second.luck == SEARCH_RATIO_ERROR
    assert run(found, before=second) == second


def test_the_search_learns_rates_but_not_that_one_failed_beside_others(monkeypatch: Any) -> None:
    """A trial that crashed rules its kind out; this one ran when it was alone."""
    monkeypatch.setattr(Rounds, "failing", (128,))
    found = searched()
    reranked = run(found)
    corrected, ranking = (
        by_batch(reranked.corrected(found.history)),
        by_batch(reranked.ranking(found.history)),
    )
    assert ranking[128].rate == 0.0
    assert corrected[128].rate == pytest.approx(980.0)
    assert corrected[64] == ranking[64]
    assert corrected[64].rate != 1000.0


@pytest.mark.parametrize(("warmup", "ran"), [(0.1, [[64, 128]]), (18.0, [])])
def test_who_takes_long_to_make_ready_must_promise_more(
    warmup: float, ran: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler takes seconds: too many for one that seemed to be 15 % behind."""
    monkeypatch.setitem(SEEN, 32, 500.0)
    monkeypatch.setitem(SEEN, 128, 850.0)
    rank(slow_to_start(searched(), warmup))
    assert Rounds.ran == ran
