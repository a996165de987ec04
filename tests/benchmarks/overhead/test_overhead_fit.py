"""The overhead's fixed cost, and the gates that are upper ends of intervals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.core.statistics import median_interval
from benchmarks.overhead import compare, fit
from benchmarks.overhead.compare import with_other_ways


def test_the_fixed_cost_is_where_the_line_meets_a_step_of_none() -> None:
    steps = (0.0003, 0.001, 0.005, 0.1)
    pairs = [fit.Pair(s, s * 1.02 + 20e-6, s, 8) for s in steps]
    assert fit.fixed_cost(pairs) == pytest.approx(20e-6)
    with pytest.raises(ValueError, match="expected two different ones or more"):
        fit.fixed_cost(pairs[:1] * 3)


def test_a_long_step_that_is_off_moves_the_fixed_cost_little() -> None:
    pairs = [fit.Pair(s, s + 20e-6, s, 8) for s in (0.0003, 0.001, 0.002, 0.005, 0.02)]
    pairs.append(fit.Pair(0.1, 0.103, 0.1, 8))  # 3 % of 100 ms are 3000 us
    assert fit.fixed_cost(pairs) == pytest.approx(20e-6, abs=10e-6)


def test_the_gate_is_the_upper_end() -> None:
    near = [fit.Pair(0.005, 0.005 * r, 0.005, 8) for r in (1.0, 1.001, 1.002, 1.003, 1.004, 1.012)]
    row = fit.case(fit.TORCH, "float32", near)
    assert row["ratio"]["ratio"] < fit.PROMISED_RATIO < row["ratio"]["high"]
    assert row["kept"] is False
    assert fit.judged(row) == fit.UNRESOLVED
    slow = [replace(pair, ours=pair.ours * 1.02) for pair in near]
    assert fit.judged(fit.case(fit.TORCH, "float32", slow)) == fit.BROKEN
    assert fit.case(fit.TORCH, "float32", near[:5] + near[:1])["kept"] is True
    short = [replace(pair, ours=pair.ours / 10, theirs=pair.theirs / 10) for pair in near]
    assert fit.case(fit.TORCH, "float32", short)["kept"] is None  # nothing is promised of 0.5 ms
    assert fit.case("Keras train_on_batch", "float32", near)["kept"] is None


def test_the_fixed_costs_gate_is_the_upper_end_over_processes() -> None:

    def process(cost: float) -> list[Any]:
        return [fit.Pair(s, s + cost, s, 8) for s in (0.001, 0.01)]

    found = fit.fixed(fit.TORCH, "float32", [process(c * 1e-6) for c in (1, 2, 3, 4, 5, 11)])
    assert found["fixed"]["middle"] == pytest.approx(3.5e-6)
    assert found["kept"] is False
    assert fit.fixed(fit.TORCH, "float32", [process(9e-6)] * 6)["kept"] is True
    assert fit.judged(found) == fit.UNRESOLVED
    said = fit.in_words({"cases": [], "fixed": [found]}, fit.UNRESOLVED)
    assert said == ["torch loop, float32: fixed cost 1 to 11 us, promised 10 us"]
    above = fit.fixed(fit.TORCH, "float32", [process(c * 1e-6) for c in (11, 12, 13, 14, 15, 16)])
    assert fit.judged(above) == fit.BROKEN
    assert fit.in_words({"cases": [], "fixed": [above]}, fit.UNRESOLVED) == []
    assert len(fit.not_kept({"cases": [], "fixed": [found, above]})) == 2


@pytest.mark.parametrize(
    ("ratios", "code"),
    [((1.001, 1.002), 0), ((1.001, 1.02), 1), ((1.02, 1.03), 1)],
    ids=["within", "unresolved", "above"],
)
def test_the_exit_code_is_that_of_the_upper_end(
    ratios: tuple[float, float], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = itertools.cycle(ratios)

    def one_process(*_: object) -> list[fit.Pair]:
        return [fit.Pair(0.01, 0.01 * next(turns), 0.01, 8)]

    monkeypatch.setattr(compare, "one_process", one_process)
    monkeypatch.setattr(compare, "machine", lambda: {"date": "today", "commit": "1"})
    words = ["--ways", "torch", "--processes", "8", "--output", str(tmp_path / "overhead.json")]
    assert compare.main(words) == code


def test_lengths_that_one_process_lacks_are_left_out() -> None:
    both = [fit.Pair(0.001, 1, 1, 4), fit.Pair(0.005, 1, 1, 8)]
    assert fit.by_target([both, both[:1]]) == [[both[0], both[0]]]


def test_one_disturbed_process_of_nine_is_outside_the_interval() -> None:
    calm = [10.0, 10.1, 10.2, 10.3, 10.4, 10.5, 10.6, 10.7]
    assert median_interval([*calm, 90.0])[1] == 10.7
    assert median_interval([*calm[:5], 90.0])[1] == 90.0


def test_a_way_measured_later_joins_the_others_of_its_machine_and_options() -> None:
    def measured(way: str, commit: str, cost: float) -> dict[str, object]:
        rows = [{"way": way, "cost": cost}]
        return {"commit": commit, "processes": 9, "cases": rows, "fixed": rows}

    torch = measured(fit.TORCH, "1", 1.0)
    both = with_other_ways(measured(fit.FIT, "1", 2.0), torch)
    assert [row["cost"] for row in both["cases"]] == [1.0, 2.0]
    assert [row["cost"] for row in both["fixed"]] == [1.0, 2.0]
    again = with_other_ways(measured(fit.TORCH, "1", 3.0), both)
    assert [row["cost"] for row in again["cases"]] == [2.0, 3.0]
    later = with_other_ways(measured(fit.FIT, "2", 4.0), both)
    assert [(row["cost"], row.get("commit")) for row in later["cases"]] == [(1.0, "1"), (4.0, None)]
    latest = with_other_ways(measured("loop", "3", 5.0), later)
    assert [row.get("commit") for row in latest["fixed"]] == ["1", "2", None]
    assert latest["commit"] == "3"
    other = measured(fit.FIT, "1", 2.0) | {"processes": 5}
    assert with_other_ways(other, torch) == other
