"""Where a study lives: a journal file by default, any Optuna storage URL on request.

A journal is a text file of JSON lines. A tuning that was killed can leave its last line torn, which
Optuna reads over but which the next append would make unreadable for good: such a tail is cut off
before the file is opened. The lock is the kernel's (flock), so a dead process never leaves it held.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from autoprec.errors import DeviceBusy, UsageError

JOURNAL_SUFFIX = ".study.journal"


def default_journal(task: Path) -> Path:
    """Where a task's study goes unless told otherwise: beside the task file."""
    return task.with_name(task.stem + JOURNAL_SUFFIX)


def repair_journal(path: Path) -> int:
    """Cut a torn last line off a journal; return how many bytes were cut."""
    try:
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            keep = size
            while keep > 0:
                start = max(0, keep - 65536)
                file.seek(start)
                block = file.read(keep - start)
                newline = block.rfind(b"\n")
                if newline >= 0:
                    keep = start + newline + 1
                    break
                keep = start
            if keep < size:
                file.truncate(keep)
                file.flush()
                os.fsync(file.fileno())
            return size - keep
    except FileNotFoundError:
        return 0


def open_storage(text: str | Path) -> Any:
    """An Optuna storage from a journal file's path, `journal://PATH`, or a storage URL."""
    name = str(text)
    if name.startswith("journal://"):
        name = name.removeprefix("journal://")
    elif "://" in name:
        return _open_url(name)
    path = Path(name).expanduser()
    if path.is_dir():
        raise UsageError(f"--storage {name}: this is a folder; give the path of a journal file")
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        repair_journal(path)
        lock = _kernel_lock(path)
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except OSError as error:
        raise UsageError(
            f"the study cannot be kept in {path}: {error.strerror or error}; choose another place "
            "with --storage"
        ) from error


def _open_url(url: str) -> Any:
    from optuna.storages import RDBStorage

    try:
        return RDBStorage(url)
    except ImportError as error:
        raise UsageError(f"--storage {_hidden(url)}: {error}; install that driver") from error
    except Exception as error:
        raise UsageError(
            f"--storage {_hidden(url)} cannot be opened: {str(error).splitlines()[0]}; expected a "
            "journal file's path or a URL such as sqlite:///study.db"
        ) from error


def _hidden(url: str) -> str:
    """The URL without its password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _kernel_lock(path: Path) -> Any:
    """A journal lock that the kernel releases when its holder dies; Optuna's own elsewhere."""
    if os.name != "posix":
        return None
    return _KernelLock(path)


class _KernelLock:
    """An flock on a file beside the journal, in the shape Optuna asks of a lock."""

    def __init__(self, path: Path) -> None:
        self._path, self._handle = f"{path}.lock", -1

    def acquire(self) -> bool:
        import fcntl

        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        os.close(self._handle)


class DeviceLock:
    """Held while trials run on a device: timing two things at once measures neither.

    The lock is a file in the temporary folder, held by flock; it is free again when its holder
    dies. Raises `DeviceBusy` if another tuning holds it and `wait` is false.
    """

    def __init__(self, device: str, *, wait: bool, folder: Path) -> None:
        name = "".join(c if c.isalnum() else "-" for c in device)
        self._path = folder / f"autoprec-{name}.lock"
        self._device, self._wait = device, wait
        self._handle = -1

    def __enter__(self) -> DeviceLock:
        if os.name != "posix":
            return self
        import fcntl

        try:
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):
                os.fchmod(self._handle, 0o666)
        except OSError:
            return self
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | (0 if self._wait else fcntl.LOCK_NB))
        except BlockingIOError:
            holder = self._holder()
            os.close(self._handle)
            self._handle = -1
            raise DeviceBusy(
                f"another tuning is measuring on {self._device}{holder}; two at once would measure "
                "neither. Wait for it with --wait, or stop it"
            ) from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, str(os.getpid()).encode(), 0)
        return self

    def _holder(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            return f" (process {int(os.pread(self._handle, 20, 0))})"
        return ""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
