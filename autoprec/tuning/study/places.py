"""Where studies are kept by default: in the user's cache directory, not beside the task.

Only the profile is left beside the user's files. A study that is there already, from an earlier
version, goes on where it is. Where there is no cache directory, or its locks do not hold on other
machines, a study is kept beside the task. A cluster's are beside its profiles: all nodes see those.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from autoprec.measurement_cache import cache_folder
from autoprec.tuning.study.network_locks import local_locks_reason
from autoprec.tuning.study.storage import JOURNAL_SUFFIX


def default_journal(task: Path) -> Path:
    """Return the default path of a task's study: in the cache, named after the task's path."""
    beside = task.with_name(task.stem + JOURNAL_SUFFIX)
    folder = studies_folder()
    if folder is None or (beside.exists() and is_writable(beside)):
        return beside
    digest = hashlib.sha256(os.fsencode(task.resolve())).hexdigest()[:12]
    kept = folder / f"{task.stem}-{digest}{JOURNAL_SUFFIX}"
    return kept if is_writable(kept) and not local_locks_reason(kept) else beside


def kept_journals() -> Iterator[Path]:
    """Yield every journal in the cache."""
    folder = studies_folder()
    if folder is not None:
        yield from sorted(folder.glob(f"*{JOURNAL_SUFFIX}"))


def is_writable(path: Path) -> bool:
    """Say whether a file, and others next to it, can be created or written, without trying it."""
    folder = next((each for each in path.parents if each.exists()), path.parent)
    return os.access(folder, os.W_OK) and (not path.exists() or os.access(path, os.W_OK))


def studies_folder() -> Path | None:
    """Return where studies are kept; None where there is no cache directory."""
    folder = cache_folder()
    return None if folder is None else folder / "studies"
