"""Opens what a study is kept in: a journal file, or any Optuna storage URL.

A journal is a text file of JSON lines. A tuning that was killed can leave its last line incomplete,
which Optuna skips but the next append would make unreadable for good: such a tail is cut off before
the file is opened. The lock is the kernel's (flock), so a dead process never keeps it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from autoprec.errors import UsageError
from autoprec.tuning.study.network_locks import local_locks_reason

JOURNAL_SUFFIX = ".study.journal"
LOCK_SUFFIX = ".lock"

#: What flock gives on a file system that has no locks, such as NFS without its lock service.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def journal_path(name: str) -> Path | None:
    """Return the file that a storage's name stands for; None where it is a database."""
    name = name.removeprefix("journal://")
    return None if "://" in name else Path(name).expanduser()


def repair_journal(path: Path) -> int:
    """Cut incomplete lines off the end of a journal; return how many bytes were cut.

    A line is incomplete if it has no newline or is not JSON (a power cut can leave zeros). The
    journal's lock must be held: another process's line is incomplete while it is being written.
    """
    try:
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            keep = size
            while keep > 0:
                start = _line_start(file, keep)
                file.seek(start)
                if _is_complete(file.read(keep - start)):
                    break
                keep = start
            if keep < size:
                file.truncate(keep)
                file.flush()
                os.fsync(file.fileno())
            return size - keep
    except FileNotFoundError:
        return 0


def _line_start(file: IO[bytes], end: int) -> int:
    """Return the offset of the line that ends before `end`."""
    at = end - 1  # the line's own newline does not count
    while at > 0:
        start = max(0, at - 65536)
        file.seek(start)
        newline = file.read(at - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        at = start
    return 0


def _is_complete(line: bytes) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def open_storage(text: str | Path) -> Any:
    """Open an Optuna storage by a journal file's path, `journal://PATH`, or a storage URL."""
    name = str(text)
    path = journal_path(name)
    if path is None:
        return _open_url(name)
    if path.is_dir():
        raise UsageError(f"`storage` {name}: this is a folder; give the path of a journal file")
    unlocked = local_locks_reason(path)
    if unlocked:
        raise UsageError(
            f"the study cannot be kept in {path}: {unlocked}, so that tunings on two machines "
            "would damage it. With `storage` choose a file on a local disk, or a database server "
            "(postgresql://...)"
        )
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    lock = _KernelLock(path) if os.name == "posix" else None  # None: Optuna's own
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock or contextlib.nullcontext():
            repair_journal(path)
        backend = JournalFileBackend(str(path), lock_obj=lock)  # type: ignore[arg-type]
        return JournalStorage(backend)
    except OSError as error:
        raise storage_error(path, error) from error
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise UsageError(
            f"{path} is not a study's journal, or it is damaged: {error}. Move it away, or choose "
            "another place with `storage`"
        ) from error


def mark_in_use(storage: str | Path, user: object) -> Callable[[], object]:
    """Mark a journal as in use until what is returned is called, or `user` no longer exists."""
    path = journal_path(str(storage))
    if path is None or os.name != "posix":
        return lambda: None
    import fcntl

    with contextlib.suppress(OSError):  # no file yet, or a file system without locks
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        release = weakref.finalize(user, os.close, handle)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return release
    return lambda: None


def remove_journal(path: Path) -> bool:
    """Remove a journal and its lock; return False, and keep it, where a tuning is using it."""
    if os.name == "posix":
        import fcntl

        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                pass
            _unlink(path)
            return True
    _unlink(path)
    return True


def _unlink(journal: Path) -> None:
    for file in (journal, Path(f"{journal}{LOCK_SUFFIX}")):
        file.unlink(missing_ok=True)


def storage_error(location: str | Path, error: BaseException) -> UsageError:
    """Make the error of a study that cannot be written: disk full, folder read-only."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error).split("\n")[0]
    number = error.errno if isinstance(error, OSError) else None
    if number in _NO_LOCKS:
        why = f"its file system has no locks that work ({why})"
    full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    fix = "free some space and run the same command again, or " if full else ""
    return UsageError(
        f"the study cannot be kept in {without_password(str(location))}: {why}; {fix}choose "
        "another place with `storage`. Finished trials are kept"
    )


def _open_url(url: str) -> Any:
    from optuna.storages import RDBStorage

    try:
        return RDBStorage(url)
    except ImportError as error:
        raise UsageError(
            f"`storage` {without_password(url)}: {error}; install that driver"
        ) from error
    except Exception as error:
        raise UsageError(
            f"`storage` {without_password(url)} cannot be opened: {str(error).splitlines()[0]}; "
            "expected a journal file's path or a URL such as sqlite:///study.db"
        ) from error


def without_password(url: str) -> str:
    """Return the URL without its password; a path as it is."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    return f"{scheme}://{rest.rpartition('@')[2]}"


class _KernelLock:
    """An flock on a file next to the journal, with the methods that Optuna expects of a lock.

    It is held for milliseconds. A holder that was suspended (Ctrl-Z) could hold it for ever, so
    waiting times out.
    """

    _TIMEOUT_SECONDS = 30.0

    def __init__(self, path: Path) -> None:
        self._path, self._handle = f"{path}{LOCK_SUFFIX}", -1

    def acquire(self) -> bool:
        import fcntl

        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline = time.monotonic() + self._TIMEOUT_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(handle)
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"another process has held {self._path} for {self._TIMEOUT_SECONDS:.0f} s "
                        "(is it suspended?)",
                    ) from None
                time.sleep(0.002)
            except BaseException:
                os.close(handle)
                raise
            else:
                self._handle = handle
                return True

    def release(self) -> None:
        handle, self._handle = self._handle, -1
        os.close(handle)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()
