"""What turns of forked processes are compared by: their rates, and how much those differ."""

from __future__ import annotations

import random

import pytest

from benchmarks.search.forking import compare


def turns(rate: float, deviation: float, seed: int) -> list[list[float]]:
    chance = random.Random(seed)
    return [[rate * chance.lognormvariate(0, deviation)] * 2 for _ in range(40)]


@pytest.mark.parametrize(("faster", "further"), [(1.0, 1.0), (1.3, 1.0), (1.0, 4.0)])
def test_forked_turns_are_compared_with_intervals(faster: float, further: float) -> None:
    found = compare(turns(100.0, 0.05, seed=1), turns(100.0 * faster, 0.05 * further, seed=2))
    for what, true in (("rate", faster), ("mean_sd", further)):
        at, low, high = found[what]
        assert low <= at <= high
        assert low <= true <= high
        assert (low <= 1.0 <= high) is (true == 1.0)


def test_turns_of_one_rate_tell_nothing_of_how_much_they_differ() -> None:
    found = compare([[100.0, 100.0]] * 5, [[200.0, 200.0]] * 5)
    assert found["rate"] == (2.0, 2.0, 2.0)
    assert "mean_sd" not in found
