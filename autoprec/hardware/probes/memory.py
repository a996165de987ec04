"""Memory and CPU limits: what is installed, and what control groups allow of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoprec.hardware.control_groups import (
    groups_of,
    memory_limits,
    parse_number,
    read_number,
)
from autoprec.hardware.machine import Machine


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
