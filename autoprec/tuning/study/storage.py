"""Opens what a study is kept in, a journal file or any Optuna storage URL, and says where that is.

A journal is a text file of JSON lines. A tuning that was killed can leave its last line incomplete,
which Optuna skips but the next append would make unreadable for good: such a tail is cut off before
the file is opened. The lock is the kernel's (flock), so a dead process never keeps it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from autoprec.errors import UsageError
from autoprec.measurement_cache import cache_folder

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


# Which mounts lock files for this machine only: two machines that share a folder there each take
# the lock on their own, and both write at once -------------------------------------------------

_MOUNTS = Path("/proc/self/mountinfo")

#: File systems on other machines, with the options that make flock local or refuse it.
#: Sources: nfs(5), `local_lock` and `nolock`; mount.lustre(8), `flock`, `localflock`, `noflock`;
#: mount.cifs(8), `nobrl`.
_LOCAL_OPTIONS = {
    "nfs": {"nolock", "local_lock=all", "local_lock=flock"},
    "nfs4": {"nolock", "local_lock=all", "local_lock=flock"},
    "lustre": {"localflock", "noflock"},
    "cifs": {"nobrl"},
    "smb3": {"nobrl"},
}

#: File systems in user space over a network, none of which locks on the other side.
_NEVER_LOCKED = {"fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.rclone"}


def local_locks_reason(path: Path, mounts: str | None = None) -> str:
    """Say why a lock on a file does not keep other machines out; "" where it does.

    `mounts` is the text of /proc/self/mountinfo; where there is none, nothing is known.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    place, kind, options = _mount_of(path.absolute(), mounts)
    if kind in _NEVER_LOCKED:
        return f"{place} is a {kind} mount, which has no locks that hold on other machines"
    local = sorted(_LOCAL_OPTIONS.get(kind, set()) & options)
    if local:
        return (
            f"{place} is a {kind} mount with the option {local[0]}: its locks hold on this machine "
            "only"
        )
    return ""


def _mount_of(path: Path, mounts: str) -> tuple[str, str, frozenset[str]]:
    """Return the mount point a path is below, its file system and options; "" where unknown."""
    best: tuple[str, str, frozenset[str]] = ("", "", frozenset())
    for line in mounts.splitlines():
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 3:
            continue
        # the kernel writes blanks and backslashes in octal
        place = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
        if path.is_relative_to(place) and len(place) >= len(best[0]):  # the last one covers others
            options = frozenset([*fields[5].split(","), *rest[2].split(",")])
            best = (place, rest[0], options)
    return best


# Where studies are kept by default: only the profile is left beside the user's files. A cluster's
# studies are beside its profiles, for all nodes see those ---------------------------------------


def default_journal(task: Path) -> Path:
    """Return the default path of a task's study: in the cache, named after the task's path.

    One that is beside the task already, from an earlier version, goes on there. Where there is no
    cache directory, or its locks do not hold on other machines, a study is kept beside the task.
    """
    beside = task.with_name(task.stem + JOURNAL_SUFFIX)
    folder = studies_folder()
    if folder is None or (beside.exists() and is_writable(beside)):
        return beside
    digest = hashlib.sha256(os.fsencode(task.resolve())).hexdigest()[:12]
    kept = folder / f"{task.stem}-{digest}{JOURNAL_SUFFIX}"
    return kept if is_writable(kept) and not local_locks_reason(kept) else beside


def kept_journals() -> list[Path]:
    """Return every journal in the cache."""
    folder = studies_folder()
    return [] if folder is None else sorted(folder.glob(f"*{JOURNAL_SUFFIX}"))


def is_writable(path: Path) -> bool:
    """Say whether a file, and others next to it, can be created or written, without trying it."""
    folder = next((each for each in path.parents if each.exists()), path.parent)
    return os.access(folder, os.W_OK) and (not path.exists() or os.access(path, os.W_OK))


def studies_folder() -> Path | None:
    """Return where studies are kept; None where there is no cache directory."""
    folder = cache_folder()
    return None if folder is None else folder / "studies"
