"""Whether other processes disturbed a measurement, by their share and the idle one."""

from __future__ import annotations

import pytest

from autoprec.core.speed.contention import Usage


@pytest.mark.parametrize(
    ("others", "idle", "high", "crowded"),
    [
        pytest.param(0.0, 0.0, False, False, id="alone"),
        pytest.param(0.15, 0.0, False, False, id="at the limit"),
        pytest.param(0.16, 0.0, True, True, id="beyond it"),
        pytest.param(0.3, 0.3, True, False, id="as much as was idle"),
        pytest.param(0.3, 0.29, True, True, id="more than was idle"),
        pytest.param(0.1, 0.05, False, False, id="little, in little room"),
        pytest.param(0.3, 0.67, True, False, id="a container on a large host"),
    ],
)
def test_others_disturb_where_they_use_much_and_more_than_was_idle(
    others: float, idle: float, high: bool, crowded: bool
) -> None:
    usage = Usage(others, idle)
    assert (usage.is_high, usage.is_crowded) == (high, crowded)
