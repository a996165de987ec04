"""How much memory a tuning may use, and the limit under which its workers run.

It may use what is free now, minus a reserve for everything else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from autoprec.backends.shared.process_memory import keeps_freed_memory, sizes_in
from autoprec.hardware.control_groups import memory_limits, parse_number, read_number
from autoprec.hardware.machine import Machine
from autoprec.workers.supervisor import available_bytes

RESERVE_SHARE = 0.10
RESERVE_BYTES = 512 * 2**20


def free_main_memory() -> int | None:
    """Return the bytes of main memory that this process may still take; None if nothing is known.

    The least counts of what the system says is available, of control groups' headroom and of
    resource limits.
    """
    free = (available_bytes(), *control_group_headroom(Machine()), *_resource_limits())
    return min(filter(None, free), default=None)


def memory_budget(*limits: int | None) -> int | None:
    """Return the bytes of main memory a worker may use; None if no limit is known.

    The least of `limits` counts, in bytes: what is free (`free_main_memory`), the machine's memory,
    a control group's. A tenth or 512 MiB of it, whichever is more, is left to others.
    """
    smallest = min(filter(None, limits), default=None)
    if smallest is None:
        return None
    return max(smallest - max(RESERVE_BYTES, int(RESERVE_SHARE * smallest)), smallest // 2)


def control_group_headroom(machine: Machine) -> Iterator[int]:
    """Yield the headroom of every control group of this process: its limit minus its usage.

    File pages that the kernel would give back (inactive_file) count as free.
    """
    for folder, version, limit in memory_limits(machine):
        name = "memory.current" if version == 2 else "memory.usage_in_bytes"
        used = read_number(machine, f"{folder}/{name}")
        if used is not None:
            yield max(limit - used + _inactive_file_bytes(machine, folder), 1)


def _inactive_file_bytes(machine: Machine, folder: str) -> int:
    for line in (machine.read(f"{folder}/memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return parse_number(value.strip()) or 0
    return 0


def _resource_limits() -> list[int]:
    """Return the resource limits of this process that workers inherit (ulimit -v, -d)."""
    if os.name != "posix" or not sys.platform.startswith("linux"):
        return []
    import resource

    found = []
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append(soft)
    return found


# The limit of a worker ---------------------------------------------------------------------------

ERROR_REPORT_BYTES = 64 * 2**20
"""Memory beyond the limit for reporting that the limit was hit."""


class MemoryLimit:
    """Makes exceeding the budget a MemoryError, not the kernel's OOM killer (RLIMIT_DATA)."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit if sys.platform.startswith("linux") else None

    def apply(self) -> None:
        """Set the limit, minus resident memory it does not count: libraries, shared memory."""
        if self._limit is None:
            return
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = max(self._limit - _uncounted_bytes(), self._limit // 4)
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def make_room(self) -> None:
        """Raise the limit to leave room for an error report, until it is applied again."""
        if self._limit is None:
            return
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        more = soft + ERROR_REPORT_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (min(more, hard) if hard >= 0 else more, hard))


def _uncounted_bytes() -> int:
    """Return what is resident beyond what the limit counts.

    Less what it counts in vain where freed memory is kept: what was given back from within the heap
    (`malloc_trim`) stays address space.
    """
    sizes = sizes_in("/proc/self/status")
    held = sizes.get("RssFile", 0) + sizes.get("RssShmem", 0)
    if not keeps_freed_memory():
        return held
    in_vain = sizes.get("VmData", 0) - sizes.get("RssAnon", 0) - sizes.get("VmSwap", 0)
    return held - max(in_vain, 0)
