"""A tuning that was stopped goes on from what it measured, wherever the stop came."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec.api import tune
from autoprec.core.profile import Profile
from autoprec.errors import NoFeasibleRecipe
from autoprec.tuning.events import Event, Progress, Stage, TrialFinished, TrialStarted

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
    pytest.mark.usefixtures("unmeasured", "in_process"),
]

TASK = """
import os, signal
from pathlib import Path
from simulated import SimulatedModel

CRASHES = Path(__file__).with_name("crashes")

class Model(SimulatedModel):
    def __getattribute__(self, name):
        if name == "nonfinite" and CRASHES.exists():  # a proof asks for it, and nothing before
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getattribute__(name)

def build_model():
    return Model(
        overhead={"float32": 0.002, "mixed_bfloat16": 0.003},
        per_sample={"float32": 0.0005, "mixed_bfloat16": 0.00025},
        noise=0.0, broken=("mixed_bfloat16",), sensitive_module="norm")

def build_data(batch_size):
    return []
"""
BOTH = ("float32", "mixed_bfloat16")

Tuned = Callable[..., tuple[Profile | None, list[str]]]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "stopped_task.py"
    path.write_text(TASK)
    return path


@pytest.fixture
def tuned(task: Path) -> Tuned:
    """Tune until `stop` says so of the events; return the profile and the recipes measured."""

    def run(
        stop: Callable[[list[Event]], bool] = lambda _: False,
        **settings: Any,
    ) -> tuple[Profile | None, list[str]]:
        events: list[Event] = []

        def listen(event: Event) -> None:
            events.append(event)
            if stop(events):
                raise KeyboardInterrupt

        given = {"policies": BOTH, "batch_sizes": "16-64", "rounds": 2, **settings}
        profile = None
        with contextlib.suppress(KeyboardInterrupt, NoFeasibleRecipe):
            profile = tune(task, listener=listen, **given)
        return profile, [e.recipe.key() for e in events if isinstance(e, TrialFinished)]

    return run


def at_stage(name: str) -> Callable[[list[Event]], bool]:
    return lambda events: isinstance(events[-1], Stage) and events[-1].name == name


def in_progress(name: str) -> Callable[[list[Event]], bool]:
    """Stop where a worker tells of its progress for the first time in a stage."""

    def stop(events: list[Event]) -> bool:
        stages = [event.name for event in events if isinstance(event, Stage)]
        return isinstance(events[-1], Progress) and stages[-1:] == [name]

    return stop


def at_trial(kind: type[TrialStarted] | type[TrialFinished]) -> Callable[[list[Event]], bool]:
    return lambda events: sum(isinstance(event, kind) for event in events) == 3


SEARCHING = {
    "before the task is loaded": at_stage("start"),
    "while it is described": in_progress("preflight"),
    "before a trial": at_trial(TrialStarted),
    "within a trial": in_progress("search"),
    "after a trial": at_trial(TrialFinished),
}
SEARCHED = {
    "before the proof": at_stage("proof"),
    "within the proof": in_progress("proof"),
    "before islands are searched for": at_stage("islands"),
    "within the search for islands": in_progress("islands"),
    "before the confirmation": at_stage("confirmation"),
    "within the confirmation": in_progress("confirmation"),
}


@pytest.mark.parametrize("moment", {**SEARCHING, **SEARCHED})
def test_no_trial_runs_twice_whenever_a_tuning_is_stopped(moment: str, tuned: Tuned) -> None:
    stopped, done = tuned({**SEARCHING, **SEARCHED}[moment])
    assert stopped is None
    profile, again = tuned()
    assert profile is not None
    assert profile.recipe.float32_modules == ("norm",)
    assert bool(again) is (moment in SEARCHING)
    assert len({*done, *again}) == len(done) + len(again) == profile.evidence.trials


@pytest.mark.usefixtures("real_workers")
def test_a_worker_that_crashes_in_the_only_proof_costs_no_trial(tuned: Tuned, task: Path) -> None:
    """The tuning ends without a recipe; without the crash the same command finds one."""
    crashes = task.with_name("crashes")
    crashes.touch()
    only = {"policies": BOTH[1:], "batch_sizes": (16, 32)}
    stopped, done = tuned(**only)
    assert stopped is None
    assert len(done) > 1
    crashes.unlink()
    profile, again = tuned(**only)
    assert profile is not None
    assert again == []
    assert profile.evidence.trials == len(done)


def test_only_a_fresh_tuning_measures_again(tuned: Tuned) -> None:
    _, done = tuned(at_stage("confirmation"))
    profile, again = tuned(fresh=True)
    assert profile is not None
    assert sorted(again) == sorted(done)
