"""Rounds that contradict the search, or themselves, are not believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.recipe import Recipe
from autoprec.tuning.race import interleaved_timing
from autoprec.tuning.stage_results import REFERENCE, ProvenRecipe, SearchResult
from tests.tuning.fake_timing import (
    FAST,
    PLAIN,
    FakeTiming,
    confirmed,
    loaded,
    proven,
    raced,
    searched,
)


@pytest.mark.parametrize(
    ("before", "ratios", "said"),
    [
        ((320.0, 350.0), (0.7, 1.0, 1.48, 1.5, 2.8, 3.2), "which may be anything"),
        ((320.0, 4400.0), (0.44,), "the search saw 13.75x, the final rounds 0.44x"),
        ((3200.0, 4800.0), (1.5,), "float32, batch 32 ran at 3200 samples/s in the search"),
    ],
)
def test_evidence_that_contradicts_itself_leaves_float32(
    search: SearchResult,
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[float, float],
    ratios: tuple[float, ...],
    said: str,
) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", loaded(*ratios))
    search = searched((PLAIN, before[0]), (FAST[32], before[1]))
    result = confirmed(search, [proven(FAST[32])])
    assert said in result.inconclusive
    assert result.choice.recipe == PLAIN
    assert result.proven is None


def test_ordinary_noise_is_no_contradiction(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of six disturbed, and a search that was 60 % off."""
    monkeypatch.setattr(
        interleaved_timing, "InterleavedTiming", loaded(1.4, 1.45, 1.4, 1.0, 1.42, 1.38)
    )
    search = searched((PLAIN, 320.0), (FAST[32], 720.0))
    result = confirmed(search, [proven(FAST[32])])
    assert result.inconclusive == ""
    assert result.proven is not None


@pytest.mark.parametrize(
    ("plain", "rest", "said"),
    [
        (824.0, 900.0, "float32, batch 32 ran at 59300 samples/s in the search and at 824"),
        (50_000.0, 100_000.0, "mixed_bfloat16, batch 32 ran at 824 samples/s in the search"),
        (50_000.0, 824.0, ""),
    ],
)
def test_a_baseline_that_is_far_ahead_of_all_else_runs_again_beside_the_best_of_it(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch, plain: float, rest: float, said: str
) -> None:
    """A neighbour came after it, or has gone since, or all else is really that slow."""
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", FakeTiming)
    monkeypatch.setattr(FakeTiming, "rate", staticmethod(lambda r: plain if r == PLAIN else rest))
    search = searched((PLAIN, 59_300.0), (FAST[32], 824.0))
    result = confirmed(search, [ProvenRecipe(PLAIN, REFERENCE, 59_300.0, 0.1)])
    assert result.inconclusive.startswith(said)
    assert bool(result.inconclusive) is bool(said)
    assert result.choice.recipe == PLAIN


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (((PLAIN, 10.0),), "nothing else was measured"),
        (((PLAIN, 10.0), (FAST[32], 9.0)), "the baseline is the fastest recipe"),
        (((PLAIN, 10.0), (FAST[32], 19.0)), "the baseline is the fastest recipe that passed"),
    ],
)
def test_why_the_baseline_is_the_answer_is_not_said_of_what_was_not_seen(
    search: SearchResult, seen: tuple[tuple[Recipe, float], ...], said: str
) -> None:
    search = searched(*seen)
    result = confirmed(search, [])
    assert result.choice.reason == said


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (
            ("recipes the search had no time to try",),
            "a limit ended the search before it tried mixed_bfloat16",
        ),
        ((), ""),
    ],
)
def test_a_limit_that_left_time_for_float32_alone_is_no_answer(
    left_out: tuple[str, ...], said: str
) -> None:
    search = replace(searched((PLAIN, 10.0)), not_covered=left_out)
    result = confirmed(search, [])
    assert result.choice.recipe == PLAIN
    assert (said in result.inconclusive) if said else not result.inconclusive


@pytest.mark.parametrize(("searched_rate", "doubted"), [(96.0, True), (40.0, False)])
def test_a_recipe_that_led_the_search_by_far_and_lost_the_race_is_not_refused_by_that(
    search: SearchResult, searched_rate: float, doubted: bool
) -> None:
    """Whoever slowed it in the race slowed nothing in the search."""
    search = raced(searched((PLAIN, 32.0), (FAST[32], searched_rate)), FakeTiming, PLAIN, FAST[32])
    plain, rival = search.finalists
    slowed = replace(rival, rates=tuple(0.23 * rate for rate in plain.rates[:3]))
    if not doubted:
        slowed = replace(rival, rates=tuple(0.9 * rate for rate in plain.rates))
    result = confirmed(replace(search, finalists=(plain, slowed)), [])
    assert result.choice.recipe == PLAIN
    assert ("ran at 3.00x the speed of the baseline" in result.inconclusive) is doubted
