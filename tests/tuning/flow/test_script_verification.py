"""Whole runs of a script in turns: what is claimed of them, what limits them, what is refused."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.core.ratio import Ratio
from autoprec.errors import TaskError, UsageError
from autoprec.tuning.events import Event, Note
from autoprec.tuning.flow import script_verification
from autoprec.tuning.flow.script_verification import ScriptJob, verify_script
from autoprec.workers.recorded_run import RecordedRun
from autoprec.workers.task_source import TaskSource
from tests.core import example_profile

STATED = Ratio(1.6, 1.5, 1.7, 9)
EVIDENCE = replace(example_profile.PROFILE.evidence, speedup=STATED)
PROFILE = replace(example_profile.PROFILE, evidence=EVIDENCE)
APPLIED = "model.profile.yaml"


def run(seconds: float = 1.0, loss: float = 2.0, **more: Any) -> RecordedRun:
    made = {"losses": (loss, loss), "profiles": (APPLIED,), "updates": 60, **more}
    return RecordedRun(seconds, 0.0, **made)


def verify(
    monkeypatch: pytest.MonkeyPatch,
    off: Sequence[RecordedRun],
    on: Sequence[RecordedRun],
    said: list[Event] | None = None,
) -> Any:
    """Verify with these runs in the place of real ones."""
    left = {True: list(off), False: list(on)}
    order: list[bool] = []

    def next_run(job: ScriptJob, *, switched_off: bool) -> RecordedRun:
        order.append(switched_off)
        return left[switched_off].pop(0)

    monkeypatch.setattr(script_verification, "_run", next_run)
    job = ScriptJob(
        TaskSource(Path("train.py"), script=True),
        PROFILE,
        Path(APPLIED),
        (said if said is not None else []).append,
        rounds=len(off),
    )
    found = verify_script(job)
    assert order == [True, False, False, True, True, False][: 2 * len(off)]
    return found


def results(found: Any) -> dict[str, str]:
    return {each.name: each.result for each in found.claims}


def test_a_script_that_gains_and_trains_alike_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    faster = 1.0 / STATED.ratio
    found = verify(monkeypatch, [run(loss=2.0)] * 3, [run(faster, loss=2.01)] * 3)
    assert results(found) == {"end to end": "holds", "losses": "holds"}
    assert found.speedup.ratio == pytest.approx(STATED.ratio)
    assert found.notes == ()


def test_a_gain_that_the_loader_eats_is_told_with_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Event] = []
    waiting = replace(run(0.99), loader_seconds=0.6)
    found = verify(monkeypatch, [run()] * 3, [waiting] * 3, said)
    assert results(found)["end to end"] == "fails"
    assert "the loader takes 61 % of an update with the profile" in found.notes[0]
    assert [each.text for each in said if isinstance(each, Note)] == list(found.notes)


def test_a_gain_that_the_scripts_own_work_eats_is_told_with_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = PROFILE.evidence.chosen.step_seconds
    (note,) = verify(monkeypatch, [run(3 * step)] * 3, [run(2 * step)] * 3).notes
    assert "takes 5120 ms, and the step that was tuned took 2560 ms: no recipe makes the" in note
    assert verify(monkeypatch, [run(3 * step)] * 3, [run(1.3 * step)] * 3).notes == ()


@pytest.mark.parametrize(
    ("off", "on", "result"),
    [
        ((2.0, 2.0, 2.0), (2.0, 2.0, 2.0), "holds"),
        ((2.0, 2.001, 2.0), (2.3, 2.31, 2.3), "fails"),
        ((2.0, 2.4, 1.7), (2.3, 1.9, 2.0), "unresolved"),  # without a seed
    ],
)
def test_losses_are_compared_with_how_much_runs_of_one_kind_differ(
    monkeypatch: pytest.MonkeyPatch, off: Sequence[float], on: Sequence[float], result: str
) -> None:
    plain, tuned = ([run(loss=each) for each in losses] for losses in (off, on))
    assert results(verify(monkeypatch, plain, tuned))["losses"] == result


@pytest.mark.parametrize(
    ("off", "on", "result"),
    [
        pytest.param(run(losses=()), run(losses=()), "unresolved", id="no loss was seen"),
        pytest.param(run(), run(losses=()), "unresolved", id="none with the profile"),
        pytest.param(run(), run(loss=math.nan), "fails", id="NaN with the profile"),
        pytest.param(run(loss=math.inf), run(), "unresolved", id="infinite in float32"),
    ],
)
def test_losses_that_cannot_be_compared_hold_nothing(
    monkeypatch: pytest.MonkeyPatch, off: RecordedRun, on: RecordedRun, result: str
) -> None:
    assert results(verify(monkeypatch, [off] * 2, [on] * 2))["losses"] == result


def test_another_profile_than_the_one_given_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verify(monkeypatch, [run()] * 3, [run(profiles=("other.yaml",))] * 3)
    assert "the script applies other.yaml, and model.profile.yaml was given" in found.notes


def test_a_script_that_ends_before_is_compared_over_what_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = {"ended": True, "updates": 10}
    found = verify(monkeypatch, [run(**ended)] * 3, [run(**ended)] * 3)
    assert "train.py ended after 10 updates, so only these are compared" in found.notes


def test_a_script_that_applies_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="applied no profile within its first 60 updates"):
        verify(monkeypatch, [run()], [run(profiles=())])


def test_a_stated_gain_is_the_one_at_the_same_batch() -> None:
    assert PROFILE.gains()[0].name == "speed-up"
    assert PROFILE.gains()[0].ratio == STATED


# Real runs ---------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="runs are ended by their process group")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('said this'); 1 / 0", "failed before its first update:\n"),
        ("print(1)", "ended, and no update of it was seen: those that a PyTorch optimizer's"),
    ],
)
def test_a_run_that_fails_shows_what_it_printed(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    job = ScriptJob(TaskSource(path, script=True), PROFILE, None, lambda event: None)
    with pytest.raises(TaskError, match=re.escape(said)) as raised:
        verify_script(job)
    assert "autoprec/" not in str(raised.value)
