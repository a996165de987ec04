"""The studies that tunings leave in the user's cache directory: what is there, and removing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from autoprec.errors import UsageError
from autoprec.tuning.study.kept_tunings import KeptTuning, read_tunings
from autoprec.tuning.study.places import default_journal, kept_journals
from autoprec.tuning.study.storage import journal_path, remove_journal


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
