"""This process's main memory: its peak, and what becomes of what is freed.

Linux keeps a high-water mark of the resident set that can be reset (proc(5),
/proc/self/clear_refs, value 5). Elsewhere getrusage's maximum since the start is used, which cannot
be reset; where the system says nothing the peak is 0.

glibc returns freed memory to the system: blocks of more than 32 MiB always, and the top of the heap
when enough of it is free. A training step allocates and frees the same tensors every time, so that
on a CPU each step faults the same pages in again, which the kernel has to clear. `mallopt` (3) can
forbid both (M_MMAP_MAX 0, M_TRIM_THRESHOLD -1): what is freed then serves the next step. The
process's memory stays at its peak; and it cannot be undone, for either call also ends glibc's own
adaptation for good.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def reset_peak_resident() -> None:
    """Forget the high-water mark so far, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def sizes_in(path: str) -> dict[str, int]:
    """Return the sizes in bytes that a file of /proc lists by name, in lines as "VmHWM: 8 kB".

    Empty where there is no such file.
    """
    with contextlib.suppress(OSError, ValueError):
        rows = (line.split() for line in Path(path).read_text().splitlines())
        return {row[0][:-1]: int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}
    return {}


def peak_resident_bytes() -> int:
    """Return the largest resident set since the start or the last reset, in bytes."""
    return sizes_in("/proc/self/status").get("VmHWM") or _rusage_peak()


def _rusage_peak() -> int:
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MemoryGrowth:
    """Notices that this process's memory still grows by more than noise.

    Such a step is not a steady one: new pages have to be cleared.
    """

    NOISE_BYTES = 8 * 2**20

    def __init__(self) -> None:
        self._peak = peak_resident_bytes()

    def since_last_check(self) -> bool:
        """Say whether the peak has risen since the last check."""
        before, self._peak = self._peak, peak_resident_bytes()
        return self._peak > before + self.NOISE_BYTES


#: mallopt's parameters and the values that keep what is freed (malloc.h, mallopt(3)).
_MALLOPT_KEEP = {-4: 0, -1: -1}

#: Allocators that take malloc's place; mallopt is not theirs.
_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "tbbmalloc")


def can_keep_freed_memory() -> bool:
    """Say whether malloc is glibc's here, which can be told to keep what is freed."""
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
        loaded = Path("/proc/self/maps").read_text()
    except (AttributeError, ValueError, OSError):
        return False
    return library.startswith("glibc") and not any(name in loaded for name in _OTHER_ALLOCATORS)


class _Kept:
    """Whether this process keeps freed memory, which cannot be undone."""

    now = False


def keep_freed_memory() -> bool:
    """Keep freed memory in this process from now on; False where that cannot be."""
    if not can_keep_freed_memory():
        return False
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        done = {mallopt(parameter, value) for parameter, value in _MALLOPT_KEEP.items()} == {1}
        _Kept.now = _Kept.now or done
        return done
    return False


def keeps_freed_memory() -> bool:
    """Say whether `keep_freed_memory` was called here, and could be done."""
    return _Kept.now


def return_freed_memory() -> None:
    """Ask the C library to return freed memory to the system (glibc), so that peaks compare."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
