"""What is called inconclusive: contradictions that no ordinary noise explains, and nothing else."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.ratio import Ratio
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.consistency import (
    RecipeRates,
    contradict,
    find_inconsistencies,
    is_too_wide,
    overstated,
    rate_changed,
)


def ratio(low: float, middle: float, high: float) -> Ratio:
    return Ratio(middle, low, high, 6)


RECORDED_UNDER_LOAD = ratio(1.10, 1.48, 2.18)

#: Results of tunings on machines that were shared as machines are, as their tables show them.
ORDINARY = [
    ratio(0.984, 1.004, 1.022),
    ratio(3.75, 4.30, 4.92),
    ratio(0.90, 1.01, 1.19),
    ratio(0.87, 0.91, 0.94),
    ratio(1.76, 1.80, 1.84),
    ratio(1.01, 1.05, 1.10),
]


def test_an_interval_wider_than_its_gain_is_too_wide() -> None:
    assert is_too_wide(RECORDED_UNDER_LOAD)
    assert is_too_wide(ratio(0.6, 1.0, 1.6))


@pytest.mark.parametrize(
    ("low", "middle", "high", "too_wide"),
    [
        (0.5, 0.7, 1.0, True),  # 1 is in the interval: it may be no slower
        (0.5, 0.7, 0.99, False),
        (1.0, 1.0, 1.5, False),
        (1.0, 1.0, 1.51, True),
        (1.0, 2.0, 2.0, False),  # as wide as the gain
        (1.0, 1.99, 2.0, True),
        (0.0, 1.0, 2.0, False),  # nothing was seen
    ],
)
def test_too_wide_is_half_as_much_again_and_more_than_the_gain(
    low: float, middle: float, high: float, too_wide: bool
) -> None:
    assert is_too_wide(ratio(low, middle, high)) is too_wide


@pytest.mark.parametrize("seen", ORDINARY)
def test_ordinary_noise_is_not(seen: Ratio) -> None:
    assert not is_too_wide(seen)
    assert not contradict(seen, Ratio(seen.ratio * 1.65, seen.low * 1.65, seen.high * 1.65, 1))


def test_no_recorded_tuning_would_have_been_called_inconclusive_for_its_interval() -> None:
    """They were made on shared machines; the widest interval's ends are 1.42 times apart."""
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    text = "".join(path.read_text() for path in results.glob("oracle-*.jsonl"))
    found = re.findall(r"is ([\d.]+)x float32 as it was run \(([\d.]+)-([\d.]+)", text)
    seen = [Ratio(*map(float, numbers), 6) for numbers in found]
    assert len(seen) >= 8
    assert [each for each in seen if is_too_wide(each)] == []
    assert max(each.high / each.low for each in seen) == pytest.approx(1.42, abs=0.01)


def test_a_large_gain_may_be_known_roughly_and_what_is_slower_is_slower() -> None:
    assert not is_too_wide(ratio(4.0, 6.8, 9.0))
    assert not is_too_wide(ratio(0.1, 0.3, 0.9))


def test_the_search_and_the_rounds_contradict_each_other_beyond_both_intervals() -> None:
    assert contradict(ratio(0.40, 0.44, 0.48), ratio(13.0, 13.76, 14.5))
    assert contradict(ratio(13.0, 13.76, 14.5), ratio(0.40, 0.44, 0.48))
    assert not contradict(ratio(1.10, 1.48, 2.18), ratio(1.05, 1.09, 1.13))


def test_twice_apart_is_no_contradiction_yet_and_an_interval_from_zero_contradicts_nothing() -> (
    None
):
    assert not contradict(ratio(0.9, 1.0, 1.0), ratio(2.0, 2.1, 2.2))
    assert contradict(ratio(0.9, 1.0, 1.0), ratio(2.01, 2.1, 2.2))
    assert not contradict(ratio(0.0, 0.5, 1.0), ratio(9.0, 10.0, 11.0))
    assert not contradict(ratio(9.0, 10.0, 11.0), ratio(0.0, 0.5, 1.0))


@pytest.mark.parametrize(
    ("raced", "confirmed", "said"),
    [
        (ratio(1.9, 2.0, 2.1), ratio(1.9, 2.0, 2.1), ""),
        (ratio(2.4, 2.5, 2.6), ratio(1.9, 2.0, 2.1), ""),  # sessions differ by as much
        (ratio(2.4, 2.5, 2.6), ratio(1.8, 1.9, 1.95), "the comparison saw 2.50x (2.40-2.60"),
        (ratio(1.4, 2.5, 3.6), ratio(0.9, 1.0, 1.2), ""),  # it had not said more
        (ratio(0.9, 1.0, 1.1), ratio(3.0, 4.0, 5.0), ""),  # understated
    ],
)
def test_a_race_overstates_a_ratio_far_above_the_confirmed_interval(
    raced: Ratio, confirmed: Ratio, said: str
) -> None:
    found = overstated(raced, confirmed)
    assert found.startswith(said)
    assert bool(found) is bool(said)


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_another_pace_is_the_same_either_way(before: float, after: float) -> None:
    assert rate_changed(before, after) == rate_changed(after, before)


def test_half_a_machine_is_no_other_pace_and_a_seventieth_is() -> None:
    assert not rate_changed(100.0, 50.0)
    assert rate_changed(59_300.0, 824.0)
    assert not rate_changed(math.sqrt(10), 1.0)
    assert rate_changed(3.17, 1.0)
    assert SPEED.contradiction_factor < SPEED.rate_change_factor


def test_every_doubt_is_said_and_none_where_all_agrees() -> None:
    quiet = RecipeRates("float32, batch 32", 100.0, (99.0, 101.0, 100.0))
    slowed = RecipeRates("mixed_bfloat16, batch 64", 1000.0, (99.0, 101.0, 400.0))
    fine = ratio(1.9, 2.0, 2.1)
    assert find_inconsistencies(fine, fine, [quiet]) == ()
    assert find_inconsistencies(fine, None, [RecipeRates("not searched", 0.0, (1.0,))]) == ()
    (pace,) = find_inconsistencies(None, None, [quiet, slowed])
    assert pace == (
        "mixed_bfloat16, batch 64 ran at 1000 samples/s in the search and at 101 in the final "
        "rounds"
    )
    slow = RecipeRates("gpt2, batch 1", 0.5, (0.0123456, 0.0123456))
    assert find_inconsistencies(None, None, [slow]) == (
        "gpt2, batch 1 ran at 0.5 samples/s in the search and at 0.0123 in the final rounds",
    )
    assert find_inconsistencies(None, None, [RecipeRates("stopped", 10.0, (0.0,))]) == ()
    (fast,) = find_inconsistencies(None, None, [RecipeRates("fast", 1234.5, (100.4,))])
    assert fast == "fast ran at 1234 samples/s in the search and at 100 in the final rounds"
    pair = find_inconsistencies(RECORDED_UNDER_LOAD, ratio(9.0, 10.0, 11.0), [quiet])
    assert pair == (
        "the search saw 10.00x, the final rounds 1.48x (1.10-2.18, 6 rounds)",
        "the final rounds saw 1.48x (1.10-2.18, 6 rounds), which may be anything",
    )
