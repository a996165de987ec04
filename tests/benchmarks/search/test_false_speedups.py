"""Where recipes are the same, a speed-up is claimed in at most one tuning of twenty."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from autoprec.core.ratio import Ratio
from benchmarks.search import false_speedups
from benchmarks.search.false_speedups import Tuned

#: Wald's sequential test (The Annals of Mathematical Statistics 16, 1945): whether speed-ups are
#: claimed as seldom as FEW or as often as MANY, each wrongly in one of twenty cases. The limit, one
#: tuning in twenty, is between the two.
FEW, MANY, ERROR = 0.02, 0.08, 0.05
MOST_TUNINGS = 400

pytestmark = pytest.mark.usefixtures("in_process")


def test_the_noise_is_that_of_recorded_runs() -> None:
    noise = sorted(false_speedups.recorded_noise())
    assert len(noise) >= 150
    assert 0.05 < noise[len(noise) // 2] < 0.12


@pytest.mark.slow
def test_recipes_that_are_the_same_are_seldom_claimed_to_be_faster() -> None:
    """Of four the luckiest is confirmed; `make false-speedups` adds tunings with torch."""
    assert FEW < false_speedups.MOST_CLAIMED == 0.05 < MANY
    found: list[Tuned] = []

    def claims() -> Iterator[bool]:
        for each in false_speedups.simulated(MOST_TUNINGS, false_speedups.POLICIES):
            found.append(each)
            yield each.claimed

    assert are_few(claims()), false_speedups.summary(found)


def are_few(claims: Iterable[bool]) -> bool:
    """Decide as early as the claims allow; at their end by which hypothesis is the likelier."""
    weight, bound = 0.0, math.log((1 - ERROR) / ERROR)
    for claimed in claims:
        weight += math.log(MANY / FEW) if claimed else math.log((1 - MANY) / (1 - FEW))
        if abs(weight) >= bound:
            break
    return weight < 0


@pytest.mark.parametrize(("share", "expected"), [(0.0, True), (0.02, True), (0.1, False)])
def test_the_sequential_test_decides_as_all_of_them_would(share: float, expected: bool) -> None:
    decided = []
    for seed in range(200):
        draws = random.Random(seed)
        decided.append(are_few(draws.random() < share for _ in range(MOST_TUNINGS)))
    assert decided.count(expected) >= 180


@pytest.mark.parametrize(("claims", "code"), [(0, 0), (1, 0), (2, 1)])
def test_more_than_one_claim_in_twenty_fails(
    claims: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gain = Ratio(1.1, 1.05, 1.2, 6)
    found = [Tuned("here", number < claims, gain, False) for number in range(20)]
    monkeypatch.setattr(false_speedups, "simulated", lambda *_: iter(found))
    output = tmp_path / "null.json"
    assert false_speedups.main(["--simulated", "20", "--output", str(output)]) == code
    assert len(json.loads(output.read_text())["runs"]["simulated, 2 policies"]["rows"]) == 20


def test_a_null_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a recipe is a fifth faster, all of them claim it."""
    task = false_speedups.TASK.replace("drift=", f"{FASTER}, drift=")
    monkeypatch.setattr(false_speedups, "TASK", task)
    monkeypatch.setattr(false_speedups, "recorded_noise", lambda: [0.02])
    found = list(false_speedups.simulated(5, false_speedups.POLICIES[:2]))
    assert all(each.claimed for each in found)


FASTER = "per_sample={{'float32': .0005, 'mixed_bfloat16': .0004}}"
