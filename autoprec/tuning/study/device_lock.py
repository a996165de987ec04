"""Locks devices while a tuning measures on them: only one tuning at a time."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from autoprec.errors import DeviceBusy


@contextlib.contextmanager
def lock_devices(
    devices: Sequence[str],
    *,
    wait: bool,
    folder: Path,
    on_wait: Callable[[str], None] = lambda text: None,
) -> Iterator[None]:
    """Hold devices while trials run on them: two measurements at once would invalidate each other.

    Each lock is a file in the temporary folder, held by flock; it is released when its holder dies.
    They are taken in one order, so that no two tunings wait for each other. Raises `DeviceBusy` if
    another tuning holds one and `wait` is false; before waiting, `on_wait` is called with the
    holder. Where a file cannot be created or locked, nothing is.
    """
    with contextlib.ExitStack() as held:
        for device in sorted(devices) if os.name == "posix" else ():
            name = "".join(c if c.isalnum() else "-" for c in device)
            handle = _open_lock(folder / f"autoprec-{name}.lock")
            if handle < 0:
                continue
            held.callback(os.close, handle)
            with contextlib.suppress(OSError):  # a file system without locks
                _lock(handle, device, wait, on_wait)
                os.ftruncate(handle, 0)  # the holder, for messages
                os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield


def _lock(handle: int, device: str, wait: bool, on_wait: Callable[[str], None]) -> None:
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = ""
        with contextlib.suppress(OSError, ValueError):
            holder = f" (process {int(os.pread(handle, 20, 0))})"
        if not wait:
            raise DeviceBusy(
                f"another tuning is measuring on {device}{holder}; running both would invalidate "
                "both timings. Wait for it with `wait`, or stop it"
            ) from None
        on_wait(f"waiting for another tuning on {device}{holder} to end")
        fcntl.flock(handle, fcntl.LOCK_EX)


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
