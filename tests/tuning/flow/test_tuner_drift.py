"""Whole tunings on a machine that is not the same all the time, and on one that has little of it.

The simulated task's steps take as many times longer as a file beside it says when the model is
built, or as the model is built late.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec.api import tune
from autoprec.core.dtypes import Policy
from autoprec.core.profile import Profile
from autoprec.tuning.events import Event, Finished, Note, Round, TrialFinished

pytestmark = pytest.mark.usefixtures("unmeasured", "in_process")

TASK = """
from pathlib import Path
from simulated import SimulatedModel

def build_model():
    place = Path(__file__).with_name("pace")
    with place.open("a") as file:
        file.write("x")
    built = len(place.read_text())
    times = {times}
    seconds = {{"float32": .0005 * times, "mixed_bfloat16": .00025 * times}}
    overhead = {{name: 0.002 * times + {sleep} for name in seconds}}
    return SimulatedModel(overhead, seconds, sleep_seconds={sleep})

def build_data(batch_size):
    return []
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a task whose steps take `times` as long as they should; that is an expression."""

    def of(times: str = "1", sleep: float = 0.0) -> Path:
        path = tmp_path / "paced_task.py"
        path.write_text(TASK.format(times=times, sleep=sleep))
        return path

    return of


def run(path: Path, **settings: Any) -> tuple[Profile, list[Event]]:
    events: list[Event] = []
    policies = ("float32", "mixed_bfloat16")
    settings = {"rounds": 5, "policies": policies, "batch_sizes": "16-64", **settings}
    return tune(path, listener=events.append, **settings), events


def batches(events: list[Event]) -> list[tuple[str, int]]:
    """The trials that were made."""
    recipes = [event.recipe for event in events if isinstance(event, TrialFinished)]
    return [(recipe.policy.value, recipe.batch_size) for recipe in recipes]


def steps_of(event: Event) -> int:
    """The steps that a trial, or a round of one step for each recipe, has made at least."""
    if isinstance(event, TrialFinished) and event.outcome.measurement is not None:
        return event.outcome.measurement.steps + event.outcome.measurement.warmup_steps
    return sum(rate > 0 for rate in event.rates) if isinstance(event, Round) else 0


def notes(events: list[Event]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Note))


#: A study's first tuning has built fewer models than this, its second more.
PACE = "{slower} if built > 10_000 else 1"


def in_two_tunings(path: Path) -> tuple[list[Event], Profile, list[Event]]:
    """Three trials, and on another day, when the machine may have another pace, the rest."""
    _, first = run(path, trials=3)
    path.with_name("pace").write_text("x" * 10_000)
    profile, second = run(path)
    return first, profile, second


def test_trials_at_another_pace_are_measured_anew(write: Callable[..., Path]) -> None:
    first, profile, second = in_two_tunings(write(PACE.format(slower=1.786)))
    assert set(batches(first)) <= set(batches(second))
    assert "measured again" in notes(second)
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert profile.evidence.inconclusive == ""
    assert profile.evidence.speedup.ratio == pytest.approx(2.0, rel=0.1)


def test_trials_at_nearly_the_same_pace_are_kept(write: Callable[..., Path]) -> None:
    first, profile, second = in_two_tunings(write(PACE.format(slower=1.3)))
    assert not set(batches(first)) & set(batches(second))
    assert "measured again" not in notes(second)
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert profile.evidence.speedup.ratio == pytest.approx(2.0, rel=0.1)


def test_a_machine_that_slows_down_after_the_baseline_is_inconclusive_and_said_again(
    write: Callable[..., Path],
) -> None:
    """All that follows seems 72 times slower, so the baseline seems to be the fastest."""
    path = write("72 if built > 3 else 1")
    profile, events = run(path)
    assert "ran at" in profile.evidence.inconclusive
    assert profile.evidence.reason.startswith("inconclusive: ")
    assert profile.recipe.policy is Policy.FLOAT32
    assert profile.recipe.batch_size == 32
    assert repr(profile).startswith(
        "<Profile of paced_task.py: inconclusive: float32, batch 32 ran"
    )
    again, events = run(path)
    assert again == profile
    assert any(isinstance(event, Finished) and event.from_study for event in events)


def test_a_time_limit_is_that_of_the_whole_tuning(write: Callable[..., Path]) -> None:
    """Search, proof and confirmation end within it, but for what had begun.

    A trial is two steps of 0.3 s at least: no proof of such a step ends in time. Without a limit
    there are more.
    """
    path = write(sleep=0.3)
    profile, events = run(path, time_limit=4.0, batch_sizes="8-1024")
    assert 1 <= len(batches(events)) <= 4
    assert 0.3 * sum(steps_of(event) for event in events) < 4.0 + 2 * 0.3
    too_long = "batches whose steps are too long to be checked in the time"
    assert any(too_long in text for text in profile.evidence.not_covered)
    assert any("its time or its trials, left out" in text for text in profile.evidence.warnings)
