"""Which recipes race after the search, and what their rounds tell."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from factories import ran_at

from autoprec.core.speed import best_arm
from autoprec.core.speed.reranking import SEARCH_RATIO_ERROR, Race, RaceCost, Reranking
from autoprec.core.speed.space import BATCH
from autoprec.core.speed.trial_results import Outcome, Status, possibly_disturbed
from tests.core.speed.machines import at


def ran(batch: int, rate: float, policy: str = "mixed_bfloat16", **fields: float) -> Outcome:
    return ran_at(at(batch, policy), rate, **fields)


BASELINE = ran(32, 300.0, "float32")
HISTORY = (BASELINE, ran(16, 400.0), ran(32, 950.0), ran(64, 1000.0), ran(128, 980.0))


def anybody(outcome: Outcome) -> bool:
    return True


def race_of(
    reranking: Reranking, history: tuple[Outcome, ...], *, together: bool = True
) -> Race | None:
    return reranking.next_race(history, anybody, lambda outcomes: together and len(outcomes) > 1)


def batches(race: Race | None) -> list[int]:
    return [int(o.point[BATCH]) for o in race.contenders] if race else []


def rates(reranking: Reranking, history: tuple[Outcome, ...] = HISTORY) -> list[float]:
    return [o.rate for o in reranking.ranking(history)]


def finished(*factors: float, rounds: int = 3) -> Reranking:
    """What the first race of HISTORY came to, if its recipes ran at so many times their rates."""
    race = race_of(Reranking(), HISTORY)
    assert race is not None
    found = [[f * o.rate] * rounds for f, o in zip(factors, race.contenders, strict=True)]
    return Reranking().with_race(race, found, HISTORY)


def test_the_fastest_race_by_their_rates_and_cost_what_the_search_says():
    race = race_of(Reranking(), tuple(replace_warmup(o, 2.0) for o in HISTORY))
    assert batches(race) == [64, 128, 32]
    assert race.reliable == (True, True, True)
    assert race.cost == RaceCost(6.0, (best_arm.TURN_SECONDS,) * 3)
    assert race.cost.min_seconds == pytest.approx(6.0 + 3 * 3 * best_arm.TURN_SECONDS)


def replace_warmup(outcome: Outcome, seconds: float) -> Outcome:
    return replace(outcome, measurement=replace(outcome.measurement, warmup_seconds=seconds))


def test_what_does_not_fit_into_memory_at_once_is_set_up_before_each_turn():
    race = race_of(Reranking(), tuple(replace_warmup(o, 2.0) for o in HISTORY), together=False)
    assert batches(race) == [64, 128, 32]
    assert race.cost == RaceCost(0.0, (pytest.approx(2.0 + best_arm.TURN_SECONDS),) * 3)


def test_whoever_is_not_allowed_or_alone_does_not_race():
    def small(outcome: Outcome) -> bool:
        return outcome.point[BATCH] < 128

    assert batches(Reranking().next_race(HISTORY, small, lambda few: True)) == [64, 32]
    assert Reranking().next_race(HISTORY[:2], small, lambda few: True) is None
    assert Reranking().next_race((), small, lambda few: True) is None


@pytest.mark.parametrize(
    ("rate", "racers"),
    [(0.8, [16, 32]), (0.6, [])],  # expected gains of 0.2 % and of nothing
)
def test_a_recipe_races_where_it_promises_more_than_the_rounds_cost(rate, racers):
    assert batches(race_of(Reranking(), (ran(16, 1000.0), ran(32, 1000.0 * rate)))) == racers


@pytest.mark.parametrize(("luck", "count"), [(SEARCH_RATIO_ERROR, 5), (0.11, 10)])
def test_five_race_and_ten_where_the_searchs_rates_are_doubted(luck, count):
    history = tuple(ran(8 * n, 1000.0 - n) for n in range(1, 13))
    race = race_of(Reranking(luck=luck), history)
    assert batches(race) == [8 * n for n in range(1, count + 1)]


@pytest.mark.parametrize(
    ("step_seconds", "racers"),
    [(1.0, 5), (2.0, 5), (2.5, 4), (5.0, 2), (5.1, 0)],  # three rounds of all take 30 s at most
)
def test_as_many_race_as_can_in_the_time(step_seconds, racers):
    history = tuple(ran(8 * n, (8 * n) / (step_seconds * n)) for n in range(1, 6))
    same = tuple(
        replace(
            o,
            measurement=replace(
                o.measurement,
                **dict.fromkeys(("step_seconds", "low", "high"), step_seconds),
                samples_per_step=100.0 - n,
            ),
        )
        for n, o in enumerate(history)
    )
    assert batches(race_of(Reranking(), same)) == [8 * n for n in range(1, racers + 1)]


def test_of_those_that_fit_into_the_time_those_race_that_promise_most():
    slow = replace_warmup(ran(128, 980.0), 29.0)
    history = (ran(64, 1000.0), slow, ran(32, 975.0), ran(16, 974.0))
    assert batches(race_of(Reranking(), history[:3])) == [64, 128]
    assert batches(race_of(Reranking(), history)) == [64, 32, 16]


def test_one_that_promises_much_races_before_two_that_promise_little():
    slow = replace_warmup(ran(128, 980.0), 29.0)
    history = (ran(64, 1000.0), slow, ran(32, 850.0), ran(16, 849.0))
    assert batches(race_of(Reranking(), history)) == [64, 128]
    assert batches(race_of(Reranking(), (history[0], *history[2:]))) == [64, 32, 16]


@pytest.mark.parametrize(("seconds", "racers"), [(0.2, [16, 32]), (2.0, [])])
def test_a_set_up_counts_once_in_what_a_recipe_must_promise(seconds, racers):
    history = (ran(16, 1000.0), replace_warmup(ran(32, 800.0), seconds))
    assert batches(race_of(Reranking(), history)) == racers


def test_who_was_slower_than_all_others_predict_runs_along():
    history = tuple(
        replace_warmup(o, 2.0)
        for o in (BASELINE, ran(16, 400.0), ran(32, 700.0), ran(64, 1000.0), ran(128, 790.0))
    )
    race = race_of(Reranking(), history)
    assert batches(race) == [64, 128]
    assert race.reliable == (True, False)
    small = Reranking().next_race(history, lambda o: o.point[BATCH] < 128, lambda few: True)
    assert small is None


def test_of_two_that_seem_slowed_the_one_predicted_faster_runs_along():
    found = {16: 400.0, 32: 700.0, 64: 1000.0, 128: 700.0, 256: 790.0, 512: 700.0}
    others = (replace_warmup(ran(batch, rate), 2.0) for batch, rate in found.items())
    history = (BASELINE, *others)
    assert [o.point[BATCH] for o in possibly_disturbed(history)] == [512, 128]
    assert batches(race_of(Reranking(), history)) == [64, 512]


def test_a_race_is_over_with_its_time_or_when_nothing_can_change():
    cost = RaceCost(20.0, (2.0, 1.0))
    equal = [[100.0, 99.0, 101.0], [101.0, 100.0, 99.0]]
    assert cost.select_contenders(equal) == (0, 1)  # 29 s are spent
    assert RaceCost(21.0, (2.0, 1.0)).select_contenders(equal) == ()
    assert cost.select_contenders([[100.0] * 3, [50.0] * 3]) == ()


def test_rates_keep_their_mean_and_take_the_ratios_of_the_rounds():
    reranked = finished(0.9, 1.1, 0.95)
    baseline, first, *raced = rates(reranked)
    assert (baseline, first) == pytest.approx((300.0, 400.0))
    true = [950.0 * 0.95, 1000.0 * 0.9, 980.0 * 1.1]
    scale = math.prod([950.0, 1000.0, 980.0]) / math.prod(true)
    assert raced == pytest.approx([rate * scale ** (1 / 3) for rate in true])
    assert reranked.trials == len(HISTORY)
    logs = [math.log(factor) for factor in (0.9, 1.1, 0.95)]
    mean = sum(logs) / 3
    error = math.sqrt(2) * math.sqrt(sum((each - mean) ** 2 for each in logs) / 2)
    assert reranked.luck == pytest.approx(error)
    assert finished(0.99, 1.01, 1.0).luck == SEARCH_RATIO_ERROR


def test_of_two_that_race_both_tell_how_far_the_search_erred():
    history = (ran(64, 1000.0), ran(128, 980.0))
    race = race_of(Reranking(), history)
    reranked = Reranking().with_race(race, [[1000.0] * 3, [1960.0] * 3], history)
    assert reranked.luck == pytest.approx(math.log(2.0))


def test_rates_that_are_not_one_for_each_contender_are_refused():
    race = race_of(Reranking(), HISTORY)
    with pytest.raises(ValueError, match="zip"):
        Reranking().with_race(race, [[1000.0] * 3], HISTORY)
    with pytest.raises(ValueError, match="zip"):
        race.cost.select_contenders([[1000.0] * 3])


def test_rates_below_one_are_learnt_as_others_are():
    history = tuple(ran(2**n, 1.0 - 0.01 * n) for n in range(2))
    race = race_of(Reranking(), history)
    reranked = Reranking().with_race(race, [[0.5] * 3, [0.6] * 3], history)
    assert reranked.corrected(history) == reranked.ranking(history) != history


def test_who_was_one_too_many_in_the_first_race_does_not_race_later():
    history = tuple(ran(8 * n, 1000.0 - n) for n in range(1, 8))
    race = race_of(Reranking(), history)
    found = [[o.rate] * 3 for o in race.contenders]
    first = Reranking().with_race(race, found, history)
    assert first.luck == SEARCH_RATIO_ERROR
    assert race_of(first, history) is None


def test_the_winner_is_the_fastest_of_those_that_are_allowed():
    history = (*HISTORY, ran(256, 990.0))
    race = finished(1.0, 1.0, 1.0).next_race(
        history, lambda o: o.point[BATCH] != 64, lambda few: True
    )
    assert batches(race) == [256, 128]


def test_who_was_eliminated_is_compared_in_the_rounds_that_it_ran():
    race = race_of(Reranking(), HISTORY)
    found = [[1000.0, 500.0, 500.0, 500.0], [980.0, 490.0, 490.0, 490.0], [950.0, 475.0, 475.0]]
    assert rates(Reranking().with_race(race, found, HISTORY)) == pytest.approx(
        [300.0, 400.0, 950.0, 1000.0, 980.0]
    )


def test_a_newcomer_races_against_the_winner_on_its_scale():
    first = finished(1.0, 1.0, 1.0)
    history = (*HISTORY, ran(256, 990.0))
    race = race_of(first, history)
    assert batches(race) == [64, 256]
    assert race.reliable == (True, False)
    second = first.with_race(race, [[500.0] * 3, [1000.0] * 3], history)
    assert rates(second, history)[3:] == pytest.approx([1000.0, 980.0, 2000.0])
    assert (second.luck, second.trials) == (SEARCH_RATIO_ERROR, len(history))
    assert race_of(second, history) is None


def test_where_the_search_erred_by_much_all_that_have_not_raced_are_looked_at():
    surprised = finished(0.7, 1.3, 1.0)
    assert surprised.luck > 0.4
    assert batches(race_of(surprised, HISTORY)) == [128, 16]
    assert race_of(replace(surprised, luck=SEARCH_RATIO_ERROR), HISTORY) is None
    assert race_of(surprised.closed(HISTORY), HISTORY) is None


def test_what_is_closed_keeps_what_raced():
    first = finished(0.7, 1.3, 1.0)
    history = (*HISTORY, ran(256, 990.0))
    assert first.closed(history) == Reranking(first.ran, len(history), SEARCH_RATIO_ERROR)


def test_a_failure_in_a_race_is_ranked_and_not_learnt_from():
    first = finished(0.7, 1.3, 1.0)
    failed = replace(HISTORY[1], status=Status.OUT_OF_MEMORY, measurement=None)
    reranked = first.with_failure(failed)
    assert reranked.ranking(HISTORY)[1] == failed
    assert reranked.corrected(HISTORY)[1] == HISTORY[1]
    assert reranked.corrected(HISTORY)[3] == first.ranking(HISTORY)[3] != HISTORY[3]
    assert (reranked.trials, reranked.luck) == (first.trials, first.luck)


@pytest.mark.parametrize(("overstated", "luck"), [(0.05, 0.1), (0.5, 0.5)])
def test_a_confirmation_that_belies_the_search_raises_the_baseline_and_the_doubt(overstated, luck):
    first = finished(1.0, 1.0, 1.0)
    doubted = first.doubted(BASELINE, overstated)
    assert rates(doubted)[0] == pytest.approx(300.0 * math.exp(overstated))
    assert (doubted.luck, doubted.trials) == (luck, first.trials)
    assert doubted.ran[:-1] == first.ran
