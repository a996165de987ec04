"""What tunings leave behind, in the cache or elsewhere: trials and profiles; and removing them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from autoprec.core.codec import DecodeError, from_plain
from autoprec.core.profile import Profile
from autoprec.core.profile.earlier import profile_from_plain
from autoprec.core.speed.trial_results import Outcome
from autoprec.errors import TaskError, UsageError
from autoprec.tuning.study.notes import FACTS, OUTCOME, RESULT, TASK_PATH, StudyNote
from autoprec.tuning.study.storage import (
    default_journal,
    journal_path,
    kept_journals,
    open_storage,
    remove_journal,
    without_password,
)
from autoprec.tuning.study.study import FINAL_SUFFIX

T = TypeVar("T")

_OF_ANOTHER_SPACE = re.compile(r"-space-[0-9a-f]{16}$")


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
    outcomes = [_decoded(OUTCOME, trial.user_attrs) for trial in trials]
    facts = _decoded(FACTS, notes)
    stored = notes.get(RESULT.name)
    profile = None
    if isinstance(stored, Mapping):
        with contextlib.suppress(DecodeError):
            profile = profile_from_plain(stored.get("profile") or {})
    ended = [trial.datetime_complete or trial.datetime_start for trial in trials]
    return KeptTuning(
        name=name,
        task=str(notes.get(TASK_PATH.name, "")),
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


def _decoded(note: StudyNote[T], kept: Mapping[str, Any]) -> T | None:
    """Return a kept value; None where there is none, or another version kept it differently."""
    plain = kept.get(note.name)
    if plain is not None:
        with contextlib.suppress(DecodeError):
            return from_plain(note.kind, plain)
    return None


@dataclass(frozen=True)
class KeptStudy:
    """A journal with the tunings in it, oldest first; `problem` says why it cannot be read."""

    place: str
    tunings: tuple[KeptTuning, ...] = ()
    problem: str = ""

    @property
    def task(self) -> str:
        """Return the task file's path; "" if it is not known."""
        return next((each.task for each in reversed(self.tunings) if each.task), "")

    @property
    def last_used(self) -> datetime | None:
        """Return when the last trial ended; the file's time if there is no trial."""
        ended = [each.last_used for each in self.tunings if each.last_used is not None]
        path = journal_path(self.place)
        if ended or path is None or not path.exists():
            return max(ended, default=None)
        return datetime.fromtimestamp(path.stat().st_mtime)

    @property
    def bytes(self) -> int:
        """Return the size of the journal; 0 for a database."""
        path = journal_path(self.place)
        return path.stat().st_size if path is not None and path.exists() else 0


def kept_studies() -> tuple[KeptStudy, ...]:
    """Return every study in the cache, the one used last first."""
    studies = (_read(journal) for journal in kept_journals())
    return tuple(sorted(studies, key=lambda each: each.last_used or datetime.min, reverse=True))


def find_study(name: str | Path) -> KeptStudy:
    """Return the study of a task file, of a journal or URL, or one in the cache by its task's name.

    Raises `UsageError` if there is none, or more than one of that name.
    """
    text = str(name)
    if "://" in text:
        return KeptStudy(text, read_tunings(text))
    path = Path(name).expanduser()
    if path.suffix == ".py":
        journal = default_journal(path.absolute())
        if not journal.exists():
            raise UsageError(f"{path} has no study: it was not tuned here, or with another storage")
        return _read(journal)
    if path.is_file():
        return _read(path)
    known = kept_studies()
    named = [each for each in known if text in (Path(each.task).stem, Path(each.place).name)]
    if len(named) == 1:
        return named[0]
    if named:
        listed = ", ".join(each.task for each in named)
        raise UsageError(f"{text} is the name of several studies; give one of the files {listed}")
    names = ", ".join(sorted({Path(each.task).stem for each in known if each.task}))
    raise UsageError(
        f"there is no study {text}; expected a task file, a journal, or "
        f"{f'one of {names}' if names else 'a name (no study is kept yet)'}"
    )


def clear_studies(studies: Sequence[KeptStudy]) -> tuple[KeptStudy, ...]:
    """Remove journals; return those that were kept because a tuning is using them."""
    kept = []
    for study in studies:
        path = journal_path(study.place)
        if path is None:
            raise UsageError(f"{study.place} is a database; remove the study there")
        if path.exists() and not remove_journal(path):
            kept.append(study)
    return tuple(kept)


def unused_for(studies: Sequence[KeptStudy], days: float) -> tuple[KeptStudy, ...]:
    """Return the studies that were last used longer ago than that."""
    limit = datetime.now() - timedelta(days=days)
    return tuple(each for each in studies if (each.last_used or datetime.min) < limit)


def _read(journal: Path) -> KeptStudy:
    try:
        return KeptStudy(str(journal), read_tunings(journal))
    except UsageError as error:
        return KeptStudy(str(journal), problem=str(error))
