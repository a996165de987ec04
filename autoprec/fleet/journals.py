"""The journals of a cluster's tunings: kept by the driver, copied to nodes, grown by whole lines.

A node that is lost takes nothing with it: what its tuning added to its copy was sent with each
event. Two drivers never write the same journals: the second is told.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from autoprec.errors import DeviceBusy, UsageError
from autoprec.tuning.study.network_locks import local_locks_reason
from autoprec.tuning.study.storage import JOURNAL_SUFFIX, open_storage, storage_error

_PROFILES_SUFFIX, _STUDIES_SUFFIX = ".profiles", ".studies"
_LOCK_NAME = "driver.lock"


def default_output(task: Path) -> Path:
    """Return the default folder of a task's profiles: next to the task file."""
    return task.with_name(task.stem + _PROFILES_SUFFIX)


def studies_folder(output: Path) -> Path:
    """Return where the journals are kept: beside the folder of profiles."""
    return output.with_name(output.name.removesuffix(_PROFILES_SUFFIX) + _STUDIES_SUFFIX)


def check_folder(output: Path) -> None:
    """Raise `UsageError` where no folder of profiles can be written: before tuning, not after."""
    if output.exists() and not output.is_dir():
        raise UsageError(f"`output` {output} is a file; expected a folder for the profiles")
    existing = next(each for each in (output, *output.parents) if each.exists())
    if not os.access(existing, os.W_OK):
        raise UsageError(f"{existing} is not writable; choose another folder with `output`")


class JournalTail:
    """A node's copy of a journal, and what was added to it."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        path.write_bytes(content)
        self._sent = len(content)

    def added(self) -> tuple[int, bytes]:
        """Return the lines added since the last call, and where they begin."""
        with self.path.open("rb") as file:
            file.seek(self._sent)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        offset, self._sent = self._sent, self._sent + len(whole)
        return offset, whole


class Journals:
    """The folder of journals, one for each device type, held by one driver at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = -1

    def __enter__(self) -> Journals:
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
            self._take_lock()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def _take_lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeviceBusy(
                f"another tuning on a cluster writes to {self.folder}; wait for it, or give this "
                "one another folder with `output`"
            ) from None
        except OSError as error:
            raise UsageError(
                f"{self.folder} cannot be locked ({error.strerror}), so that two tunings could "
                "write it at once; choose a folder on another file system with `output`"
            ) from error

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def path(self, name: str) -> Path:
        """Return where the journal of a device type is."""
        return self.folder / f"{name}{JOURNAL_SUFFIX}"

    def read(self, name: str) -> bytes:
        """Return a type's journal, repaired where a driver was killed while it wrote."""
        path = self.path(name)
        if not path.exists():
            return b""
        open_storage(path)  # cuts an incomplete line off; refuses what is no journal
        return path.read_bytes()

    def append(self, name: str, offset: int, lines: bytes) -> None:
        """Keep what a node added at `offset`; what is known already is left as it is."""
        if not lines:
            return
        path = self.path(name)
        try:
            with path.open("ab") as file:
                if file.tell() != offset:
                    return
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(path, error) from error
