"""The worker's service by itself: what one trial is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.workers.handlers import Service

FIRST = Measurement(
    0.13, 0.12, 0.14, 5, 32.0, peak_memory_bytes=70, warmup_seconds=2.0, warmup_steps=3
)


class Session:
    """Takes the step times of a list, one for each timing."""

    def __init__(self, *steps: float) -> None:
        self.steps = list(steps)
        self.closed = False

    def time_steps(self, budget: TimingBudget) -> Measurement:
        step = self.steps.pop(0)
        if step == FIRST.step_seconds:
            return FIRST
        return replace(
            FIRST, step_seconds=step, peak_memory_bytes=80, warmup_seconds=0.0, warmup_steps=1
        )

    def close(self) -> None:
        self.closed = True


def trial(session: Session, foreseen: float | None) -> Measurement:
    service = Service(lambda phase, step: None)
    service._task = cast(Any, SimpleNamespace())
    service._backend = cast(Any, SimpleNamespace(open=lambda *args, **kwargs: session))
    budget = TimingBudget(expected_seconds=foreseen)
    measured = service.measure(recipe=Recipe(batch_size=32), seed=0, budget=budget)
    assert session.closed
    return measured


@pytest.mark.parametrize(("again", "kept"), [(0.1, 0.1), (0.15, 0.15)])
def test_what_seems_disturbed_is_timed_twice_and_the_second_counts(
    again: float, kept: float
) -> None:
    session = Session(0.13, again)
    measured = trial(session, foreseen=0.1)
    assert session.steps == []
    assert measured.step_seconds == kept
    assert (measured.warmup_seconds, measured.warmup_steps) == (2.0, 3)
    assert measured.peak_memory_bytes == 80


@pytest.mark.parametrize("foreseen", [None, 0.12])
def test_what_is_as_foreseen_is_timed_once(foreseen: float | None) -> None:
    session = Session(0.13, 0.1)
    assert trial(session, foreseen) == FIRST
    assert session.steps == [0.1]
