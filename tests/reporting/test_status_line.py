"""What a tuning is doing now, about how long it goes on, and how a notebook shows it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from factories import FakeClock, device_of_family, steady

from autoprec import api, probing
from autoprec.core.device.policies import propose
from autoprec.core.measurement import TaskFacts
from autoprec.core.recipe import Recipe
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.reporting.notebook import HtmlLine, Notebook, in_notebook
from autoprec.reporting.status_line import StatusLine, time_left_text
from autoprec.tuning.events import (
    Described,
    Finished,
    Note,
    Progress,
    Round,
    Stage,
    Started,
    TrialFinished,
    TrialStarted,
)

TASK = TaskFacts("torch", {}, 32, 32, 1000)
RECIPE = Recipe()


def trial(now: Any, clock: FakeClock, seconds: float, step: float = 0.1) -> None:
    """One more trial, of so many seconds."""
    measured = steady(step, warmup_seconds=1.0)
    outcome = Outcome({"policy": "float32"}, Status.OK, measured)
    now(TrialStarted(0, RECIPE, "why"))
    clock.now += seconds
    now(TrialFinished(0, RECIPE, outcome, outcome.rate, outcome.rate / 2))


def test_nothing_is_guessed_before_a_trial_has_run() -> None:
    now = StatusLine(clock=FakeClock(100.0))
    assert now.text == "starting"
    now(Stage("preflight", "one float32 step"))
    assert (now.text, now.seconds_left()) == ("first step: one float32 step", None)


def test_what_is_left_goes_down_from_stage_to_stage_to_nothing() -> None:
    clock = FakeClock(100.0)
    now = StatusLine(clock=clock)
    device = device_of_family("amd-zen5")
    now(Started("task.py", device, propose(device), "study"))
    now(Described(TASK, 0, 32))
    now(Stage("search", "32 recipes"))
    left = []
    for _ in range(4):
        trial(now, clock, 2.0)
        left.append(now.seconds_left())
    # Sixteen trials of 2 s, 200 steps of 0.1 s, turns of 0.15 s and half as much again, processes
    # of 2 s and sessions of 1 s with a warm-up of 1 s: six that take eight turns, and in each of
    # three rounds three that take five.
    race = 2.0 + 6 * (2.0 + 8 * 0.225)
    confirmation = 3 * (2.0 + 3 * (2.0 + 5 * 0.225))
    rest = 20.0 + race + confirmation
    assert left == pytest.approx([30.0 + rest, 28.0 + rest, 26.0 + rest, 24.0 + rest])
    for name in ("reranking", "proof", "confirmation"):
        now(Stage(name))
        left.append(now.seconds_left())
    assert left[-3:] == pytest.approx([rest, rest - race, confirmation])
    clock.now += 60.0
    assert now.seconds_left() == 0.0


def test_a_time_limit_bounds_the_guess() -> None:
    clock = FakeClock(100.0)
    now = StatusLine(limit=20.0, clock=clock)
    assert now.seconds_left() == 20.0
    now(Stage("search", "32 recipes"))
    trial(now, clock, 5.0)
    assert now.seconds_left() == 15.0


def test_the_line_says_which_trial_and_round_it_is_and_where_in_it() -> None:
    now = StatusLine(clock=FakeClock(100.0))
    now(Described(TASK, 0, 32))
    now(TrialStarted(2, RECIPE, "why"))
    now(Progress("steps", 3))
    assert now.text == "trial 3 of at most 32: float32, batch 32  [timing, step 3]"
    now(Stage("confirmation", "the winner against the baseline"))
    now(Round(2, 12, (10.0, 20.0, 0.0)))
    assert now.text == "confirmation: round 2 of at most 12: 2.00x"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "almost done"), (41.0, "about 40 s left"), (100.0, "about 2 min left")],
)
def test_a_guess_is_no_sharper_than_it_is(seconds: float, said: str) -> None:
    assert time_left_text(seconds) == said


class Cell:
    """A notebook's output cell: what was displayed, the last of what was updated."""

    def __init__(self) -> None:
        self.shown: list[HtmlLine] = []

    def __call__(self, line: HtmlLine, display_id: bool = False) -> Cell | None:
        self.shown.append(line)
        self.updated = len(self.shown) - 1
        return self if display_id else None

    def update(self, line: HtmlLine) -> None:
        self.shown[0] = line


def test_a_notebook_shows_one_line_that_is_empty_at_the_end_and_warnings_stay() -> None:
    cell, clock = Cell(), FakeClock(100.0)
    notebook = Notebook(cell, clock)
    notebook(Stage("search", "3 recipes <b>of</b> yours"))
    assert "&lt;b&gt;" in cell.shown[0]._repr_html_()
    clock.now += 1.0
    notebook(Stage("proof", "mixed_bfloat16"))
    notebook(Progress("trace", 1))  # too soon after that to be shown
    assert repr(cell.shown[0]) == "check: mixed_bfloat16"
    notebook(Note("others are busy", warning=True))
    notebook(Finished(SimpleNamespace(), (), "place"))  # type: ignore[arg-type]
    assert [repr(line) for line in cell.shown] == ["", "warning: others are busy"]


def test_tune_shows_it_in_a_notebook_and_is_silent_elsewhere_or_when_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The task's file is missing, so that nothing else happens."""

    class ZMQInteractiveShell:
        """What IPython's kernel calls itself."""

    made: list[object] = []
    monkeypatch.setattr("autoprec.reporting.notebook._ipython_display", lambda: made.append)
    assert not in_notebook()
    kernel = SimpleNamespace(get_ipython=ZMQInteractiveShell)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert in_notebook()
    listeners: list[object] = []
    monkeypatch.setattr(probing, "probe_here", lambda device, on_wait: on_wait("a driver is slow"))
    path = tmp_path / "t.py"
    path.write_text("")
    monkeypatch.setattr(Notebook, "__call__", lambda self, event: listeners.append(event))
    said: list[object] = []
    for listener in (None, said.append):
        with pytest.raises(AttributeError):  # there is no probe's result to go on with
            api.tune(path, listener=listener)
    assert listeners == said == [Note("a driver is slow")]
