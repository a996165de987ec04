"""The table of limits shows the constants of the code."""

from __future__ import annotations

import pytest

from autoprec.core.speed import stopping
from benchmarks.report.limits import Limit, above_one, limits, product


def test_a_changed_constant_changes_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = (line for line in limits() if "a gain worth a trial" in line)
    assert "| 1 % |" in before
    monkeypatch.setattr(stopping.Limits, "gain", 0.03)
    (after,) = (line for line in limits() if "a gain worth a trial" in line)
    assert "| 3 % |" in after


def test_numbers_are_made_of_several_constants() -> None:
    tolerance = "core.numerics.tolerance:Tolerance"
    row = Limit("t", "{:g} %", (f"{tolerance}.loss", f"{tolerance}.skipped"), product)
    assert row.text() == "2 %"
    assert row.where() == "`core.numerics.tolerance`: Tolerance.loss, Tolerance.skipped"
    speed = "core.speed.assumptions:Assumptions"
    both = Limit("t", "{:.0f} to {:.0f} %", (f"{speed}.disturbed_ratio_range",), above_one)
    assert both.text() == "20 to 65 %"


def test_a_constant_that_is_gone_is_an_error() -> None:
    with pytest.raises(AttributeError, match="NO_SUCH"):
        Limit("t", "{}", ("core.speed.noise:NO_SUCH",)).text()
