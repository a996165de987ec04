"""The journals of a cluster's tunings: kept by the driver, copied to nodes, sent back whole.

A node that is lost takes nothing with it: its journal was sent before each event that it grew by.
Two drivers never write the same journals: the second is told.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from autoprec.errors import DeviceBusy, UsageError
from autoprec.tuning.study.storage import (
    JOURNAL_SUFFIX,
    local_locks_reason,
    open_storage,
    storage_error,
)
from autoprec.yaml_files import write_text

_PROFILES_SUFFIX, _STUDIES_SUFFIX = ".profiles", ".studies"
_LOCK_NAME = "driver.lock"


def default_output(task: Path) -> Path:
    """Return the default folder of a task's profiles: next to the task file."""
    return task.with_name(task.stem + _PROFILES_SUFFIX)


def studies_folder(output: Path) -> Path:
    """Return where the journals are kept: beside the folder of profiles."""
    return output.with_name(output.name.removesuffix(_PROFILES_SUFFIX) + _STUDIES_SUFFIX)


def check_folder(output: Path) -> None:
    """Raise `UsageError` if no folder of profiles can be written: before tuning, not after."""
    if output.exists() and not output.is_dir():
        raise UsageError(f"`output` {output} is a file; expected a folder for the profiles")
    existing = next(each for each in (output, *output.parents) if each.exists())
    if not os.access(existing, os.W_OK):
        raise UsageError(f"{existing} is not writable; choose another folder with `output`")


def read_journal(path: Path) -> str:
    """Return the whole lines of a journal; "" if there is no such file."""
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[: text.rfind("\n") + 1]


class Journals:
    """The folder of journals, one for each device type, held by one driver at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = -1

    def __enter__(self) -> Journals:
        import fcntl

        unlocked = local_locks_reason(self.folder)
        if unlocked:
            raise UsageError(
                f"trials cannot be kept in {self.folder}: {unlocked}, so that tunings on two "
                "machines would damage them; choose a folder on another file system with `output`"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(self.folder, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.__exit__()
            if isinstance(error, BlockingIOError):
                raise DeviceBusy(
                    f"another tuning on a cluster writes to {self.folder}; wait for it, or give "
                    "this one another folder with `output`"
                ) from None
            raise UsageError(
                f"{self.folder} cannot be locked ({error.strerror}), so that two tunings could "
                "write it at once; choose a folder on another file system with `output`"
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def path(self, name: str) -> Path:
        """Return where the journal of a device type is."""
        return self.folder / f"{name}{JOURNAL_SUFFIX}"

    def read(self, name: str) -> str:
        """Return a type's journal; `UsageError` if the file is none."""
        path = self.path(name)
        if path.exists():
            open_storage(path)
        return read_journal(path)

    def write(self, name: str, text: str) -> None:
        """Replace a type's journal, whole or not at all."""
        try:
            write_text(self.path(name), text)
        except OSError as error:
            raise storage_error(self.path(name), error) from error
