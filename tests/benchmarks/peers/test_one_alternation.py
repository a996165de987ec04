"""The three comparisons with peers come of one alternation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from benchmark_rows import BF16, SPACE

from autoprec.core.codec import to_plain
from autoprec.core.recipe import Recipe
from benchmarks.peers import compare, entrants
from benchmarks.peers.entrants import Entrant, KeptJob

FLOAT32 = Recipe(batch_size=32)
FOUND: compare.Found = {
    "autoprec": {"peak_memory_bytes": 3},
    "lightning": {"peak_memory_bytes": 7},
    "float32": {"peak_memory_bytes": 1},
}


def test_each_comparison_has_the_rates_of_its_own_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, large = Entrant(BF16, kept=False), replace(BF16, batch_size=8192)
    sides = {
        "chosen": (
            {"lightning": ours, "float32": ours},
            {"lightning": Entrant(large, True), "float32": Entrant(FLOAT32, True)},
        ),
        "knobs": ({"lightning": Entrant(large, False)}, {"lightning": Entrant(large, True)}),
    }
    rates = {ours.marked.key(): [4.0, 8.0], Entrant(FLOAT32, True).marked.key(): [2.0, 4.0]}
    asked: list[Mapping[str, int]] = []

    def alternate(job: object, recipes: Any, peaks: Mapping[str, int], rounds: int) -> Any:
        asked.append(peaks)
        error = RuntimeError("out of memory")
        for recipe in recipes:
            if recipe.key() not in rates:
                raise _naming(error, recipe)
        return rates

    monkeypatch.setattr(entrants, "alternate", alternate)
    rows = compare.time_in_alternation(cast(KeptJob, None), FOUND, sides, rounds=6)

    assert rows["chosen"]["float32"]["ours_over"]["ratio"] == pytest.approx(2.0)
    assert rows["chosen"]["float32"]["rates"] == {"ours": [4.0, 8.0], "theirs": [2.0, 4.0]}
    assert rows["chosen"]["lightning"]["failed"] == "theirs does not train: out of memory"
    assert rows["chosen"]["lightning"]["theirs"] == to_plain(large)
    assert rows["knobs"]["lightning"]["failed"] == "theirs does not train: out of memory"
    assert len(asked) == 3, "equal recipes of two comparisons were not run as one"
    assert asked[0][ours.marked.key()] == 7, "the larger of both searches' peaks bounds ours"
    assert asked[0][Entrant(FLOAT32, True).marked.key()] == 1


def test_where_autoprec_chose_nothing_the_rivals_are_measured_beside_plain_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare, "helped", lambda job, recipe, space, chosen: recipe)
    found: compare.Found = {
        "lightning": {"recipe": to_plain(BF16)},
        "accelerate": {"note": "failed"},
        "autoprec": {"note": "not finished in 120 s"},
        "autoprec, batch fixed": {"recipe": to_plain(replace(BF16, batch_size=32))},
    }
    job = cast(KeptJob, None)
    sides = compare.entrants_of(job, SPACE, found, ("lightning", "accelerate"), batch=32)
    assert sides["chosen"] == (
        {"lightning": Entrant(FLOAT32, kept=False)},
        {"lightning": Entrant(BF16, kept=True)},
    )
    assert set(sides) == {"chosen", "fixed"}
    found["autoprec"]["recipe"] = to_plain(BF16)
    sides = compare.entrants_of(job, SPACE, found, ("lightning",), batch=32)
    assert sides["chosen"][0]["lightning"].recipe == BF16
    assert set(sides) == {"chosen", "fixed", "knobs"}


def _naming(error: RuntimeError, recipe: Recipe) -> RuntimeError:
    error.recipe = recipe  # type: ignore[attr-defined]
    return error
