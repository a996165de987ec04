"""Checks what no proof in a process can: that the whole script gains by its profile.

Fresh runs of the unchanged script, switched off (AUTOPREC=off: float32, at the profile's batch) and
with its profile, take turns. Each ends after its first updates. Recipes are never chosen by this.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from autoprec.core.codec import to_plain
from autoprec.core.number_words import milliseconds, percent
from autoprec.core.profile import Profile
from autoprec.core.profile.claims import Claim, Verification, judge_speedup
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.statistics import median
from autoprec.errors import TaskError, UsageError
from autoprec.tuning.events import Listener, Note, Stage
from autoprec.workers.environment import plain_environment
from autoprec.workers.recorded_run import RecordedRun
from autoprec.workers.task_source import TaskSource

ROUNDS, UPDATES = 3, 60

#: The mean losses of the first updates may differ by this share: lower precision rounds, and small
#: differences grow in training.
_LOSS_SHARE = 0.02

#: Runs whose losses differ between themselves allow this many times as much between the two kinds.
_NOISE_FACTOR = 3.0

#: A script that ends by itself after fewer has too few to time beside its start.
_FEWEST_UPDATES = 8

_LIMITING_SHARE = 0.25
_SHOWN_CHARACTERS = 2000
_PROGRAM = Path(sys.modules[RecordedRun.__module__].__file__ or "")


@dataclass(frozen=True)
class ScriptJob:
    """A script, its profile, and how often and how long it is run; `file` is the profile's place.

    A run may take `seconds`.
    """

    source: TaskSource
    profile: Profile
    file: Path | None
    listener: Listener
    rounds: int = ROUNDS
    updates: int = UPDATES
    seconds: float = 1800.0


def verify_script(job: ScriptJob) -> Verification:
    """Run the script in turns; say whether it gains what the profile states, and trains alike.

    Raises `TaskError` where the script fails, `UsageError` where it applies no profile.
    """
    off, on = list[RecordedRun](), list[RecordedRun]()
    for number in range(job.rounds):
        job.listener(Stage("confirmation", f"the script in turns, round {number + 1}"))
        turns = ((off, True), (on, False))
        for runs, switched_off in turns if number % 2 == 0 else reversed(turns):
            runs.append(_run(job, switched_off=switched_off))
    notes = (*_notes(job, off, on),)
    for note in notes:
        job.listener(Note(note, warning=True))
    ratio = paired_ratio([each.seconds for each in off], [each.seconds for each in on])
    gains = job.profile.gains()
    stated = gains[0].ratio if gains and gains[0].name == "speed-up" else None
    said = "no speed-up at this batch" if stated is None else stated.in_words()
    result = "holds" if stated is None else judge_speedup(stated, ratio)
    claims = (Claim("end to end", result, said, ratio.in_words()), _losses_claim(off, on))
    return Verification(claims, ratio, notes=notes)


def _notes(job: ScriptJob, off: Sequence[RecordedRun], on: Sequence[RecordedRun]) -> list[str]:
    """Say what limits the gain, and what was not as it should be; raise if nothing was applied."""
    applied = {each for run in on for each in run.profiles}
    if not applied:
        raise UsageError(
            f"{job.source.name} applied no profile within its first {job.updates} updates: add the "
            "line for its trainer (docs/trainers.md), then verify it"
        )
    found = []
    fewest = min(run.updates for run in (*off, *on))
    if fewest < job.updates:
        found.append(f"{job.source.name} ended after {fewest} updates, so only these are compared")
    others = [each for each in applied if each and job.file and not _is_same(each, job.file)]
    if others:
        found.append(f"the script applies {', '.join(sorted(others))}, and {job.file} was given")
    share = median([run.loader_seconds / run.seconds for run in on])
    if share >= _LIMITING_SHARE:
        found.append(
            f"the loader takes {percent(share)} of an update with the profile, which no recipe "
            "makes faster: give it more workers"
        )
    step = job.profile.evidence.chosen.step_seconds
    update = median([run.seconds for run in on])
    own = update - step - median([run.loader_seconds for run in on])
    if step and own >= _LIMITING_SHARE * update:
        found.append(
            f"an update with the profile takes {milliseconds(update)}, and the step that was tuned "
            f"took {milliseconds(step)}: no recipe makes the script's logging, callbacks and other "
            "work faster"
        )
    return found


def _is_same(one: str, other: Path) -> bool:
    return Path(one).resolve() == other.resolve()


def _losses_claim(off: Sequence[RecordedRun], on: Sequence[RecordedRun]) -> Claim:
    """Compare the mean losses of both kinds with each other and among runs of one kind."""
    stated = "the same as float32's"
    if not all(run.losses for run in (*off, *on)):
        return Claim("losses", "unresolved", stated, "no loss was seen in some runs")
    plain, tuned = ([sum(run.losses) / len(run.losses) for run in runs] for runs in (off, on))
    if not all(map(math.isfinite, (*plain, *tuned))):
        broken = all(map(math.isfinite, plain))
        result: Literal["fails", "unresolved"] = "fails" if broken else "unresolved"
        return Claim("losses", result, stated, "not finite")
    scale = abs(median(plain)) or 1.0
    between = median([abs(a - b) / scale for a in plain for b in tuned])
    pairs = [*combinations(plain, 2), *combinations(tuned, 2)]
    within = max((abs(a - b) / scale for a, b in pairs), default=0.0)
    found = f"{percent(between)} apart, {percent(within)} between runs of one kind"
    if between <= max(_LOSS_SHARE, _NOISE_FACTOR * within):
        return Claim("losses", "holds" if within <= _LOSS_SHARE else "unresolved", stated, found)
    return Claim("losses", "fails", stated, found)


def _run(job: ScriptJob, *, switched_off: bool) -> RecordedRun:
    """Run the script in a process of its own; return its record."""
    environment = plain_environment(os.environ)
    environment["AUTOPREC"] = "off" if switched_off else ""
    with tempfile.TemporaryDirectory(prefix="autoprec-script-") as folder:
        record, log = Path(folder) / "record.json", Path(folder) / "log"
        settings = {
            "source": to_plain(job.source),
            "updates": job.updates,
            "write_to": str(record),
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
            try:
                process.wait(job.seconds)
            except subprocess.TimeoutExpired:
                raise TaskError(
                    f"{job.source.name} made fewer than {job.updates} updates within "
                    f"{job.seconds:.0f} s; give fewer as `updates`"
                ) from None
            finally:
                _end(process)
        if not record.exists():
            printed = log.read_text(encoding="utf-8", errors="replace")[-_SHOWN_CHARACTERS:]
            raise TaskError(f"{job.source.name} failed before its first update:\n{printed}")
        said = json.loads(record.read_text(encoding="utf-8"))
        found = RecordedRun(
            **{**said, **{each: tuple(said[each]) for each in ("losses", "profiles")}}
        )
    if found.ended and not found.updates:
        raise TaskError(
            f"{job.source.name} ended, and no update of it was seen: those that a PyTorch "
            "optimizer's step() makes are, and those of Keras's fit"
        )
    if found.updates < min(job.updates, _FEWEST_UPDATES):
        raise TaskError(
            f"{job.source.name} ended after {found.updates} updates, which are too few "
            f"to time: let it train for {job.updates} or more"
        )
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run and all that it started."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
