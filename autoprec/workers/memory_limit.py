"""How much memory a tuning may use: what is free now, minus a reserve for everything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from autoprec.workers.supervisor import available_bytes

RESERVE_SHARE = 0.10
RESERVE_BYTES = 512 * 2**20

_ROOT = Path("/")


def memory_budget(limit_bytes: int | None, *, used_bytes: int = 0) -> int | None:
    """Return the bytes of main memory a worker may use; None where nothing is known.

    `limit_bytes` is what this process may use at all (the machine's memory or a control group's
    limit), `used_bytes` what it uses already. The least of that, of what the system says is
    available, of control groups' headroom and of resource limits counts; a tenth or 512 MiB of it,
    whichever is more, is left to others.
    """
    free = (
        available_bytes(),
        _headroom(limit_bytes, used_bytes),
        *control_group_headroom(),
        *_resource_limits(),
    )
    known = [value for value in free if value]
    if not known:
        return None
    smallest = min(known)
    return max(smallest - max(RESERVE_BYTES, int(RESERVE_SHARE * smallest)), smallest // 2)


def _headroom(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(limit - used, 1)


def control_group_headroom(root: Path = _ROOT) -> Iterator[int]:
    """Yield the headroom of every control group of this process: its limit minus its usage.

    File pages that the kernel would give back (inactive_file) count as free. Version 2 and version
    1; Linux kernel documentation, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    for folder, limit_name, used_name in _control_groups(root):
        limit, used = _read_limit(folder / limit_name), _read_limit(folder / used_name)
        if limit is not None and used is not None:
            yield max(limit - used + _inactive_file_bytes(folder), 1)


def _control_groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield (folder, limit file, usage file) of this process's groups and their ancestors."""
    top = root / "sys/fs/cgroup"
    for line in _read_lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if controllers == "":
            mount, names = top, ("memory.max", "memory.current")
            if (top / "unified").is_dir():
                mount = top / "unified"
        elif "memory" in controllers.split(","):
            mount, names = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for end in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:end]), *names


def _inactive_file_bytes(folder: Path) -> int:
    for line in _read_lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.strip().isdigit():
            return int(value)
    return 0


def _read_limit(path: Path) -> int | None:
    """Read the number in a file; None for "max", and for the huge number version 1 has instead."""
    text = "".join(_read_lines(path)).strip()
    if not text.isascii() or not text.isdigit():
        return None
    return int(text) if int(text) < 2**60 else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


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
