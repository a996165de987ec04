"""Peak resident memory of this process, where the system says it; 0 where it does not.

Linux keeps a high-water mark that can be reset (proc(5), /proc/self/clear_refs, value 5).
Elsewhere getrusage's maximum since the start is used, which cannot be reset.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def reset_peak_resident() -> None:
    """Forget the high-water mark so far, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """The largest resident set since the start or the last reset, in bytes."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return _rusage_peak()


def _rusage_peak() -> int:
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def give_back_memory() -> None:
    """Ask the C library to return freed memory to the system (glibc), so that peaks compare."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
