"""How wide a tolerance is, and how far losses are apart."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from autoprec.core.numerics.tolerance import Tolerance
from autoprec.errors import UsageError

#: What a wider tolerance leaves as it is: steps that may be skipped, and what training settles at.
KEPT = ("skipped", "trajectory_slack")


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_a_tolerance_is_widened_in_everything_that_is_compared(factor):
    before = asdict(Tolerance())
    expected = {name: value * (1 if name in KEPT else factor) for name, value in before.items()}
    assert asdict(Tolerance().scaled(factor)) == pytest.approx(expected)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_a_tolerance_of_nothing_or_of_everything_is_refused(factor):
    with pytest.raises(UsageError) as caught:
        Tolerance().scaled(factor)
    assert str(caught.value) == (
        f"tolerance {factor!r} given, expected a factor above 0: 1 is the default, 0.5 twice as "
        "strict, 2 twice as wide"
    )
