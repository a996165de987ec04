"""Reads what a study's place holds: the tunings, their trials, and the profiles they ended with."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from autoprec.core.codec import DecodeError, from_plain
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.earlier_profiles import profile_from_plain
from autoprec.core.profile import Profile
from autoprec.core.speed.trial_results import Outcome
from autoprec.errors import TaskError
from autoprec.tuning.study.storage import (
    journal_path,
    open_storage,
    remove_journal,
    without_password,
)
from autoprec.tuning.study.study import FINAL_SUFFIX, OUTCOME

T = TypeVar("T")

RESULT, TASK_PATH = "result", "task_path"
_OF_ANOTHER_SPACE = re.compile(r"-space-[0-9a-f]{16}$")


@dataclass(frozen=True)
class StoredProfile:
    """A finished tuning as it is kept in the study, with the limits it was finished under."""

    profile: Profile
    limits: str


@dataclass(frozen=True)
class KeptTuning:
    """One tuning of a study's place; `profile` is None where it has not ended.

    `task` is the task file's path, "" where a version before 0.2 kept it.
    """

    name: str
    task: str
    device: str
    last_used: datetime | None
    outcomes: tuple[Outcome, ...]
    profile: Profile | None


def read_tunings(place: str | Path) -> tuple[KeptTuning, ...]:
    """Return the tunings that a journal or a database holds, the last one used last.

    Raises `UsageError` where it cannot be opened.
    """
    storage = open_storage(place)
    notes: dict[str, Mapping[str, Any]] = {}
    trials: dict[str, list[Any]] = {}
    for study in storage.get_all_studies():
        name = study.study_name
        if name.endswith(FINAL_SUFFIX):
            continue
        own = _OF_ANOTHER_SPACE.sub("", name)
        if own == name:
            notes[own] = study.user_attrs
        held = storage.get_all_trials(storage.get_study_id_from_name(name), deepcopy=False)
        trials.setdefault(own, []).extend(held)
    found = [_tuning(name, notes[name], trials[name]) for name in notes]
    return tuple(sorted(found, key=lambda each: each.last_used or datetime.min))


def _tuning(name: str, notes: Mapping[str, Any], trials: list[Any]) -> KeptTuning:
    outcomes = [_decoded(Outcome, trial.user_attrs.get(OUTCOME)) for trial in trials]
    facts = _decoded(DeviceFacts, notes.get("facts"))
    stored = notes.get(RESULT)
    profile = None
    if isinstance(stored, Mapping):
        with contextlib.suppress(DecodeError):
            profile = profile_from_plain(stored.get("profile") or {})
    ended = [trial.datetime_complete or trial.datetime_start for trial in trials]
    return KeptTuning(
        name=name,
        task=str(notes.get(TASK_PATH, "")),
        device="" if facts is None else facts.name,
        last_used=max((each for each in ended if each is not None), default=None),
        outcomes=tuple(each for each in outcomes if each is not None),
        profile=profile,
    )


@contextlib.contextmanager
def trials_kept(storage: str | Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Keep what ran inside the block where an error of the task ends it, and `tell` the user.

    A journal that was created inside the block is removed if no trial ran: a corrected task file is
    a different task, whose study needs nothing from this one.
    """
    path, began = journal_path(str(storage)), datetime.now()
    new = path is not None and not path.exists()
    try:
        yield
    except TaskError:
        last = _last_trial(storage) if path is None or path.exists() else datetime.min
        if last >= began:
            tell(
                f"the trials that ran are kept in {without_password(str(storage))}: the same "
                "command goes on from them, if the task is the same"
            )
        elif new and last == datetime.min and path is not None and path.exists():
            with contextlib.suppress(OSError):
                remove_journal(path)
        raise


def _last_trial(storage: str | Path) -> datetime:
    """Return when the last trial of a place ended, now if that cannot be read."""
    try:
        tunings = read_tunings(storage)
    except Exception:  # whatever keeps it from answering: the error at hand matters more
        return datetime.now()
    ended = [each.last_used for each in tunings if each.outcomes and each.last_used is not None]
    return max(ended, default=datetime.min)


def _decoded(kind: type[T], plain: Any) -> T | None:
    """Return a kept value; None where there is none, or another version kept it differently."""
    if plain is not None:
        with contextlib.suppress(DecodeError):
            return from_plain(kind, plain)
    return None
