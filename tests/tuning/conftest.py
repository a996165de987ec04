"""Fixtures that several tests of tuning use."""

from __future__ import annotations

import pytest
from factories import steady

from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.race import ablations, interleaved_timing
from autoprec.tuning.stage_results import (
    SearchResult,
)
from tests.tuning.fake_timing import JOB, SPACE, FakeTiming, search_of


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> SearchResult:
    monkeypatch.setattr(interleaved_timing, "InterleavedTiming", FakeTiming)
    monkeypatch.setattr(FakeTiming, "failing", ())
    outcomes = tuple(
        Outcome(
            point,
            Status.OK,
            steady(0.1, FakeTiming.rate(SPACE.recipe(point)) / 10),
        )
        for point in SPACE.points()
    )
    monkeypatch.setattr(ablations, "clearly_pays", lambda *_: True)
    return search_of(outcomes)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JOB, "float32_allowed", False)
