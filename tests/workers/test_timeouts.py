"""How long a worker may go on without progress."""

from __future__ import annotations

import pytest

from autoprec.errors import UsageError
from autoprec.workers.timeouts import PATIENCE_VARIABLE, allowed_seconds, patience_factor


@pytest.mark.parametrize(
    ("phase", "slowest", "patience", "seconds"),
    [
        ("load", 0.0, 1.0, 300.0),
        ("compile", 5.0, 1.0, 1200.0),  # another phase's steps say nothing of it
        ("load", 0.0, 10.0, 3000.0),
        ("steps", 0.0, 1.0, 77.0),  # none was seen yet
        ("steps", 0.5, 1.0, 60.0),
        ("steps", 2.0, 1.0, 60.0),
        ("steps", 10.0, 1.0, 300.0),
        ("steps", 10.0, 2.0, 600.0),
        ("trace", 10.0, 1.0, 77.0),  # its steps are not those that were timed
        ("trace", 10.0, 3.0, 231.0),
    ],
)
def test_a_phase_may_go_on_for_as_long_as_its_kind_and_its_steps_say(
    phase: str, slowest: float, patience: float, seconds: float
) -> None:
    allowed = allowed_seconds(
        phase, first_step_seconds=77.0, slowest_step_seconds=slowest, patience=patience
    )
    assert allowed == seconds


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "nan", "inf"])
def test_patience_that_is_no_number_is_refused(text: str, monkeypatch) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, text)
    with pytest.raises(UsageError, match=PATIENCE_VARIABLE):
        patience_factor()


def test_patience_is_one_by_default(monkeypatch) -> None:
    monkeypatch.delenv(PATIENCE_VARIABLE, raising=False)
    assert patience_factor() == 1.0
