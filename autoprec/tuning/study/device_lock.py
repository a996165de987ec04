"""Locks devices while a tuning measures on them: only one tuning at a time."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from autoprec.errors import DeviceBusy


class DeviceLock:
    """Held while trials run on a device: two measurements at once would invalidate each other.

    The lock is a file in the temporary folder, held by flock; it is released when its holder dies.
    Raises `DeviceBusy` if another tuning holds it and `wait` is false; before waiting, `on_wait` is
    called with the holder. Where the file cannot be created, nothing is locked.
    """

    def __init__(
        self,
        device: str,
        *,
        wait: bool,
        folder: Path,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        name = "".join(c if c.isalnum() else "-" for c in device)
        self._path = folder / f"autoprec-{name}.lock"
        self._device, self._wait, self._on_wait = device, wait, on_wait
        self._handle = -1

    def __enter__(self) -> DeviceLock:
        if os.name != "posix":
            return self
        import fcntl

        self._handle = _open_lock(self._path)
        if self._handle < 0:
            return self
        try:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not self._wait:
                    raise DeviceBusy(
                        f"another tuning is measuring on {self._device}{self._holder()}; running "
                        "both would invalidate both timings. Wait for it with `wait`, or stop it"
                    ) from None
                if self._on_wait is not None:
                    self._on_wait(
                        f"waiting for another tuning on {self._device}{self._holder()} to end"
                    )
                fcntl.flock(self._handle, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            self._close()
            return self
        except BaseException:
            self._close()
            raise
        with contextlib.suppress(OSError):  # only for messages; a full disk does not matter
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, str(os.getpid()).encode(), 0)
        return self

    def _holder(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            return f" (process {int(os.pread(self._handle, 20, 0))})"
        return ""

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()


@contextlib.contextmanager
def lock_devices(
    devices: Sequence[str],
    *,
    wait: bool,
    folder: Path,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Hold the locks of several devices; see `DeviceLock`.

    They are taken in one order, so that no two tunings wait for each other.
    """
    with contextlib.ExitStack() as held:
        for device in sorted(devices):
            held.enter_context(DeviceLock(device, wait=wait, folder=folder, on_wait=on_wait))
        yield


def _open_lock(path: Path) -> int:
    """Open the lock file, which every user may open; return its descriptor, -1 where it fails.

    The folder is world-writable, so a link there is not followed: it could lead to a file that must
    not be written. An existing file is opened without O_CREAT, which the kernel denies for another
    user's file (fs.protected_regular).
    """
    common = os.O_CLOEXEC | os.O_NOFOLLOW
    for flags in (os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        try:
            handle = os.open(path, flags | common, 0o666)
        except OSError:
            continue
        seen = os.fstat(handle)
        if not stat.S_ISREG(seen.st_mode) or seen.st_nlink > 1 or seen.st_size > 20:
            os.close(handle)
            return -1
        if flags & os.O_CREAT:
            with contextlib.suppress(OSError):
                os.fchmod(handle, 0o666)
        return handle
    return -1
