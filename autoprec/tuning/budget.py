"""How much memory a tuning may use: what is free now, less a reserve for everything else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

RESERVE_SHARE = 0.10
RESERVE_BYTES = 512 * 2**20


def memory_budget(limit_bytes: int | None, *, used_bytes: int = 0) -> int | None:
    """Bytes of main memory a worker may use; None where nothing is known.

    `limit_bytes` is what this process may use at all (the machine's memory or a control group's
    limit). What the system says is available now counts as well, and so do resource limits; a tenth
    or 512 MiB, whichever is more, is left to others.
    """
    known = [value for value in (_available(), _less(limit_bytes, used_bytes), *_limits()) if value]
    if not known:
        return None
    smallest = min(known)
    return max(smallest - max(RESERVE_BYTES, int(RESERVE_SHARE * smallest)), smallest // 2)


def _less(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(limit - used, 1)


def _available() -> int | None:
    """MemAvailable: what can be used without swapping (proc(5))."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _limits() -> list[int]:
    """Resource limits of this process that workers inherit (ulimit -v, -d)."""
    if os.name != "posix" or not sys.platform.startswith("linux"):
        return []
    import resource

    found = []
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append(soft)
    return found
