"""What is timed next to the winner: simpler recipes, and the parts of its speedup."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
from factories import steady

from autoprec.core.dtypes import Policy
from autoprec.core.profile import Present
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.space import point_key
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.race import ablations, interleaved_timing
from autoprec.tuning.stage_results import (
    SearchResult,
)
from tests.tuning.fake_timing import (
    FAST,
    JOB,
    KEPT,
    PLAIN,
    SPACE,
    FakeTiming,
    Several,
    at,
    confirmed,
    proven,
    search_of,
)


class Keeping(FakeTiming):
    """Keeping memory is worth `gain`."""

    gain = 1.0

    @classmethod
    def rate(cls, recipe: Recipe) -> float:  # type: ignore[override]
        return FakeTiming.rate(recipe) * (cls.gain if recipe.keeps_memory else 1.0)


@pytest.mark.parametrize(("gain", "kept"), [(1.3, True), (1.01, False)])
def test_memory_is_kept_only_where_it_pays_at_the_winner(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch, gain: float, kept: bool
) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Keeping)
    monkeypatch.setattr(Keeping, "gain", gain)
    monkeypatch.setattr(ablations, "clearly_pays", lambda *_: False)
    result = confirmed(search, [proven(KEPT)])
    assert result.proven is not None
    assert result.proven.recipe.keeps_memory is kept
    assert result.over_baseline is not None
    assert result.over_baseline.ratio == pytest.approx(4.0 * (gain if kept else 1.0))


def test_where_the_baseline_left_no_doubt_the_winner_is_not_run_without_it(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Keeping)
    result = confirmed(search, [proven(KEPT)])
    assert result.proven is not None
    assert result.proven.recipe == KEPT
    assert FAST[64].key() not in result.measured


class Knobs(FakeTiming):
    """A contest in which the knobs have a worth of their own each."""

    worth: ClassVar[dict[str, float]] = {}

    @classmethod
    def rate(cls, recipe: Recipe) -> float:  # type: ignore[override]
        gains = [cls.worth.get(name, 1.0) for name, value in recipe.knobs.items() if value]
        return FakeTiming.rate(recipe) * math.prod(gains)


@pytest.mark.parametrize(
    ("fused", "implicit", "kept"),
    [
        (1.1, 1.1, {"fused_optimizer", "implicit_bfloat16"}),
        (0.95, 1.1, {"implicit_bfloat16"}),  # the search had taken it for faster
        (1.1, 0.8, {"fused_optimizer"}),
        (1.005, 1.1, {"implicit_bfloat16"}),  # it brings nothing
        (0.95, 0.95, set()),
    ],
)
@pytest.mark.parametrize("policy", [Policy.MIXED_BFLOAT16, Policy.FLOAT32])
def test_a_knob_is_kept_only_where_it_wins_by_itself(
    search: SearchResult,
    monkeypatch: pytest.MonkeyPatch,
    fused: float,
    implicit: float,
    kept: set[str],
    policy: Policy,
) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Knobs)
    monkeypatch.setattr(Knobs, "worth", {"fused_optimizer": fused, "implicit_bfloat16": implicit})
    knobs = {"fused_optimizer": True, "implicit_bfloat16": True}
    result = confirmed(search, [proven(Recipe(policy, 64, knobs=knobs))])
    assert result.proven is not None
    assert set(result.proven.recipe.knobs) == kept
    assert result.over_baseline is not None
    worth = math.prod({"fused_optimizer": fused, "implicit_bfloat16": implicit}[k] for k in kept)
    assert result.over_baseline.ratio == pytest.approx(
        FakeTiming.rate(Recipe(policy, 64)) / 32 * worth
    )


@pytest.mark.parametrize("size", [64, 32])
def test_what_is_float32_otherwise_is_compared_however_long_it_takes(
    search: SearchResult, size: int
) -> None:
    """The gain at the same batch is what a tuning is for."""
    step = 0.8 * size / 32
    slow = steady(step, step * size)
    search = search_of(
        tuple(
            replace(o, measurement=slow)
            for o in search.trials.history
            if (o.point["policy"], o.point["batch_size"]) == ("float32", size)
        )
    )
    result = confirmed(search, [proven(FAST[64])])
    assert result.over_baseline is not None
    assert result.at_same_batch is not None


@pytest.mark.parametrize(("step", "least", "most"), [(0.6, 0.6, 0.9), (1.2, 0.9, 1.2)])
def test_a_step_at_a_larger_batch_is_estimated_from_what_ran_there(
    search: SearchResult, step: float, least: float, most: float
) -> None:
    """A GPU takes as long for a small batch: twice the batch is not twice the baseline's step."""
    kept = replace(PLAIN, batch_size=64, knobs={KEEP_MEMORY: True})
    steps = {PLAIN.key(): 0.6, kept.key(): step, FAST[64].key(): 0.3}
    search = search_of(
        tuple(
            Outcome(SPACE.point(recipe), Status.OK, steady(steps[recipe.key()], recipe.batch_size))
            for recipe in (PLAIN, kept, FAST[64])
        )
    )
    larger = replace(PLAIN, batch_size=64)
    seconds = ablations.Ablations(JOB, search).seconds(larger, new_processes=False)
    assert least < (seconds - SPEED.worker_seconds) / SPEED.min_rounds < most


def test_a_process_of_its_own_in_every_round_is_what_a_part_costs(search: SearchResult) -> None:
    made = ablations.Ablations(JOB, search)
    alone = made.seconds(PLAIN)
    beside = made.seconds(replace(PLAIN, knobs={KEEP_MEMORY: True}))
    assert alone - beside == pytest.approx(SPEED.min_rounds * SPEED.worker_seconds)
    assert made.seconds(PLAIN, new_processes=False) < alone / 2


@pytest.fixture
def slow_float32(search: SearchResult) -> SearchResult:
    """A search in which float32 takes so long at the larger batch that comparing it is dear."""
    slow = steady(0.8 * 2, 0.8 * 64)
    return search_of(
        tuple(
            replace(o, measurement=slow)
            if (o.point["policy"], o.point["batch_size"]) == ("float32", 64)
            else o
            for o in search.trials.history
        )
    )


def test_every_part_is_timed_on_request_however_long_that_takes(
    slow_float32: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Knobs)
    monkeypatch.setattr(Knobs, "worth", {"fused_optimizer": 1.1, "threads": 1.2, KEEP_MEMORY: 1.3})
    knobs = {"threads": 2, "fused_optimizer": True, KEEP_MEMORY: True}
    winner = [proven(Recipe(Policy.MIXED_BFLOAT16, 64, knobs=knobs))]
    whole = 2.0 * 1.2 * 1.1 * 2.0 * 1.3

    def parts() -> dict[str, float]:
        result = confirmed(slow_float32, winner)
        assert result.over_baseline is not None
        assert result.over_baseline.ratio == pytest.approx(whole)
        return {part.what: part.speedup.ratio for part in result.waterfall}

    assert len(parts()) < 5
    monkeypatch.setattr(JOB.options, "attribute", True)
    assert parts() == pytest.approx(
        {"precision": 2, "threads=2": 1.2, "fused_optimizer": 1.1, "batch": 2, "kept memory": 1.3}
    )


def test_what_fails_of_the_parts_is_left_out(
    slow_float32: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JOB.options, "attribute", True)
    monkeypatch.setattr(FakeTiming, "failing", (replace(PLAIN, batch_size=64).key(),))
    result = confirmed(slow_float32, [proven(FAST[64])])
    assert [part.what for part in result.waterfall] == ["precision and batch"]


def test_the_parts_of_a_speedup_are_measured_and_multiply_to_the_whole(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Several)
    search = at(Several)
    result = confirmed(search, [proven(KEPT)])
    assert result.over_baseline is not None
    assert result.over_baseline.ratio == pytest.approx(3.3)
    assert [(p.what, round(p.speedup.ratio, 6), p.against) for p in result.waterfall] == [
        ("precision", 1.5, "float32, batch 64, memory kept"),
        ("batch", 2.0, "float32, batch 32, memory kept"),
        ("kept memory", 1.1, "float32, batch 32"),
    ]


def test_of_a_model_in_16_bits_no_part_is_over_float32(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Several)
    search = at(Several)
    low = replace(search.trials.task, weights_in="bfloat16")
    search = replace(search, trials=replace(search.trials, task=low))
    result = confirmed(search, [proven(KEPT)])
    assert [part.against for part in result.waterfall] == [
        "own bfloat16, batch 64, memory kept",
        "own bfloat16, batch 32, memory kept",
        "own bfloat16, batch 32",
    ]


def test_parts_that_would_take_long_are_one(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What precision brings is asked first."""
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Several)
    between = replace(PLAIN, knobs={KEEP_MEMORY: True})
    steps = {point_key(SPACE.point(between)): 0.7}
    search = search_of(
        tuple(
            replace(o, measurement=steady(step, o.rate * step))
            for o in at(Several).trials.history
            for step in (steps.get(point_key(o.point), 0.5),)
        )
    )
    result = confirmed(search, [proven(KEPT)])
    assert [(p.what, round(p.speedup.ratio, 6)) for p in result.waterfall] == [
        ("precision", 1.5),
        ("batch and kept memory", 2.2),
    ]


def test_what_does_not_fit_beside_the_others_is_left_out(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three fit; what precision brings is asked first."""
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", Several)
    monkeypatch.setattr(JOB, "memory_bytes", 350)
    search = search_of(
        tuple(
            replace(o, measurement=replace(o.measurement, peak_memory_bytes=100))
            for o in at(Several).trials.history
            if o.measurement is not None
        )
    )
    result = confirmed(search, [proven(KEPT)])
    assert [part.what for part in result.waterfall] == ["precision", "batch and kept memory"]


def test_the_gain_over_what_the_user_trains_with_is_measured_at_the_users_batch(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JOB.options, "baseline", Policy.MIXED_BFLOAT16)
    result = confirmed(search, [proven(FAST[64])])
    assert result.over_baseline is not None
    assert result.present is not None
    assert result.present.policy is Policy.MIXED_BFLOAT16
    yours = FakeTiming.rate(FAST[32]) / FakeTiming.rate(PLAIN)
    assert result.present.speedup.ratio == pytest.approx(result.over_baseline.ratio / yours)
    assert FAST[32].key() in result.measured


def test_a_recipe_that_the_user_trains_with_already_gains_nothing_over_it(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JOB.options, "baseline", Policy.MIXED_BFLOAT16)
    result = confirmed(search, [proven(FAST[32])])
    assert result.present == Present(Policy.MIXED_BFLOAT16)
    assert result.present.speedup.rounds == 0


@pytest.mark.parametrize("attribute", [True, False])
def test_what_the_user_trains_with_may_fail(
    search: SearchResult, monkeypatch: pytest.MonkeyPatch, attribute: bool
) -> None:
    monkeypatch.setattr(JOB.options, "baseline", Policy.MIXED_FLOAT16)
    monkeypatch.setattr(JOB.options, "attribute", attribute)
    yours = PLAIN.with_policy(Policy.MIXED_FLOAT16)
    monkeypatch.setattr(FakeTiming, "failing", (yours.key(),))
    result = confirmed(search, [proven(FAST[64])])
    assert result.over_baseline is not None
    assert result.at_same_batch is not None
    assert result.present is None
