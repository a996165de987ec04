"""Memory and CPU time that this process may use: what is installed, and its control groups' limits.

Version 2 first (the process's own group and every group above it), then version 1.
Source: Linux kernel documentation, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoprec.hardware.machine import Machine

#: Version 1 shows "no limit" as the largest page-aligned number; anything this large is no limit.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True)
class _Mount:
    root: str
    point: str
    controllers: tuple[str, ...]
    version: int


def groups_of(machine: Machine, controller: str) -> Iterator[tuple[str, int]]:
    """Yield the folders of the process's own group and those above it, with their versions."""
    own = dict(_memberships(machine))
    for mount in _mounts(machine):
        if mount.version == 1 and controller not in mount.controllers:
            continue
        path = own.get("" if mount.version == 2 else controller)
        yield from ((folder, mount.version) for folder in _upwards(mount, path))


def _memberships(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (controller, path) from /proc/self/cgroup; version 2's controller is ""."""
    for line in (machine.read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(","):
            yield name, path


def _mounts(machine: Machine) -> list[_Mount]:
    mounts = []
    for line in (machine.read("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if len(before) < 5 or len(after) < 3 or after[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if after[0] == "cgroup2" else 1
        mounts.append(_Mount(before[3], before[4], tuple(after[2].split(",")), version))
    if not mounts and machine.entries("/sys/fs/cgroup"):
        mounts.append(_Mount("/", "/sys/fs/cgroup", (), 2))
    return sorted(mounts, key=lambda mount: -mount.version)


def _upwards(mount: _Mount, path: str | None) -> Iterator[str]:
    """Yield the group's folder and its parents up to the mount; only the mount if outside it."""
    root = mount.root.rstrip("/")
    inside = path is not None and (path == root or path.startswith(root + "/"))
    parts = [part for part in path[len(root) :].split("/") if part] if path and inside else []
    if ".." in parts:
        parts = []
    for end in range(len(parts), -1, -1):
        yield "/".join([mount.point, *parts[:end]])


def read_number(machine: Machine, path: str) -> int | None:
    """Read a non-negative integer; None for "max", "-1" and anything else."""
    text = (machine.read(path) or "").strip()
    return parse_number(text)


def parse_number(text: str) -> int | None:
    """Parse a non-negative integer; None for "max", "-1" and anything else."""
    return int(text) if text.isdigit() and text.isascii() else None


def memory_limits(machine: Machine) -> Iterator[tuple[str, int, int]]:
    """Yield (folder, version, bytes) of every group that limits this process's memory."""
    for folder, version in groups_of(machine, "memory"):
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        limit = read_number(machine, f"{folder}/{name}")
        if limit is not None and limit < _NO_LIMIT_BYTES:
            yield folder, version, limit


@dataclass(frozen=True)
class Limits:
    """What this process may use; None if there is no limit or it is unknown.

    `core_quota` is CPU seconds per second: 0.5 is half a core.
    """

    memory_bytes: int | None = None
    memory_limited: bool = False
    core_quota: float | None = None


def read_limits(machine: Machine) -> Limits:
    """Read installed memory, and the tightest limits of the groups this process is in."""
    installed = _installed(machine)
    limits = [limit for _, _, limit in memory_limits(machine)]
    tightest = min(limits, default=None)
    known = [each for each in (installed, tightest) if each is not None]
    return Limits(
        memory_bytes=min(known, default=None),
        memory_limited=tightest is not None and (installed is None or tightest < installed),
        core_quota=min(_core_quotas(machine), default=None),
    )


def _installed(machine: Machine) -> int | None:
    for line in (machine.read("/proc/meminfo") or "").splitlines():
        words = line.split()
        if words[:1] == ["MemTotal:"] and words[1:2] and words[1].isdigit():
            return int(words[1]) * 1024
    return machine.physical_memory()


def _core_quotas(machine: Machine) -> Iterator[float]:
    for folder, version in groups_of(machine, "cpu"):
        if version == 2:
            words = (machine.read(f"{folder}/cpu.max") or "").split()
            quota, period = map(parse_number, words) if len(words) == 2 else (None, None)
        else:
            quota = read_number(machine, f"{folder}/cpu.cfs_quota_us")
            period = read_number(machine, f"{folder}/cpu.cfs_period_us")
        if quota and period:
            yield quota / period
