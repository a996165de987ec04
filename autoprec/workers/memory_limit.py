"""How much memory a tuning may use: what is free now, minus a reserve for everything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from autoprec.hardware.control_groups import memory_limits, parse_number, read_number
from autoprec.hardware.machine import Machine
from autoprec.workers.supervisor import available_bytes

RESERVE_SHARE = 0.10
RESERVE_BYTES = 512 * 2**20


def memory_budget(limit_bytes: int | None) -> int | None:
    """Return the bytes of main memory a worker may use; None if nothing is known.

    `limit_bytes` is what this process may use at all (the machine's memory or a control group's
    limit). The least of that, of what the system says is available, of control groups' headroom and
    of resource limits counts; a tenth or 512 MiB of it, whichever is more, is left to others.
    """
    free = (
        available_bytes(),
        limit_bytes,
        *control_group_headroom(Machine()),
        *_resource_limits(),
    )
    known = [value for value in free if value]
    if not known:
        return None
    smallest = min(known)
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
