"""Which nodes of a cluster are of one type: those whose devices have the same fingerprint.

Memory counts as the same within what `profile.fit` accepts without a warning, for two nodes of one
model rarely report the same number of bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoprec.core.device.facts import DeviceFacts, Fingerprint
from autoprec.core.profile import Profile
from autoprec.core.profile.fit import memory_differs

#: The most nodes that a sentence names.
_LISTED = 3


@dataclass(frozen=True)
class NodeReport:
    """What the probe of one node told.

    `node` is what its scheduler calls it, `name` what people do. `facts` are those of its first
    device, `others` names devices of other types beside it. `problem` says why nothing can be tuned
    there, empty if it can.
    """

    node: str
    name: str
    facts: DeviceFacts | None = None
    software: Mapping[str, str] = field(default_factory=dict)
    autoprec: str = ""
    others: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class NodeType:
    """Nodes whose devices are the same to a profile; the first is the best to tune on.

    The fingerprint has the least memory of them, in bytes `memory_bytes`, so that what fits there
    fits on all. `disagreements` names what else differs: driver, versions.
    """

    name: str
    fingerprint: Fingerprint
    memory_bytes: int | None
    nodes: tuple[NodeReport, ...]
    disagreements: tuple[str, ...] = ()


@dataclass(frozen=True)
class TypeResult:
    """How the tuning of one type ended: `profile`, or `reason` why there is none.

    `failed` tells an error from a type that nothing could be tuned on.
    """

    type: NodeType
    profile: Profile | None = None
    file: str = ""
    reason: str = ""
    failed: bool = False


@dataclass(frozen=True)
class FleetResult:
    """How a tuning on a cluster ended, type by type; `unfit` are nodes that nothing can run on."""

    types: tuple[TypeResult, ...]
    unfit: tuple[NodeReport, ...] = ()


def group_nodes(reports: Iterable[NodeReport]) -> tuple[NodeType, ...]:
    """Return the types of the nodes without a problem, by name."""
    fit = [each for each in reports if not each.problem and each.facts is not None]
    groups: list[list[NodeReport]] = []
    for report in sorted(fit, key=lambda each: (_fingerprint(each).memory_gib, each.name)):
        own = _fingerprint(report)
        alike = (group for group in groups if is_same_type(_fingerprint(group[0]), own))
        group = next(alike, None)
        if group is None:
            groups.append(group := [])
        group.append(report)
    names = _names([_fingerprint(group[0]) for group in groups])
    types = [_make_type(name, group) for name, group in zip(names, groups, strict=True)]
    return tuple(sorted(types, key=lambda each: each.name))


def is_same_type(one: Fingerprint, other: Fingerprint) -> bool:
    """Return whether two devices are of one type."""
    alike = replace(one, memory_gib=other.memory_gib) == other
    return alike and not memory_differs(one, other)


def _fingerprint(report: NodeReport) -> Fingerprint:
    assert report.facts is not None  # group_nodes leaves others out
    return report.facts.fingerprint


def _make_type(name: str, group: Sequence[NodeReport]) -> NodeType:
    """Make a type of its nodes: those with the most common software first."""
    common = Counter(_installed(each) for each in group)
    nodes = sorted(group, key=lambda each: (-common[_installed(each)], each.name))
    known = [each.facts.observation.memory_bytes for each in group if each.facts is not None]
    least = min((each for each in known if each is not None), default=None)
    return NodeType(name, _fingerprint(group[0]), least, tuple(nodes), _disagreements(nodes))


def _installed(report: NodeReport) -> tuple[tuple[str, str], ...]:
    """Return what is installed on a node that its speed may depend on."""
    driver = report.facts.observation.driver if report.facts is not None else ""
    return (("driver", driver), *sorted(report.software.items()))


def _disagreements(nodes: Sequence[NodeReport]) -> tuple[str, ...]:
    """Say of everything installed that differs between nodes which have which."""
    differing = []
    for name in dict.fromkeys(name for each in nodes for name, _ in _installed(each)):
        by_version: dict[str, list[str]] = {}
        for each in nodes:
            version = dict(_installed(each)).get(name, "")
            by_version.setdefault(version or "none", []).append(each.name)
        if len(by_version) > 1:
            parts = []
            for version, holders in by_version.items():
                more = f" and {len(holders) - _LISTED} more" if len(holders) > _LISTED else ""
                parts.append(f"{version} on {', '.join(holders[:_LISTED])}{more}")
            differing.append(f"{name}: {'; '.join(parts)}")
    return tuple(differing)


# Names, which are also those of the files ------------------------------------------------------


def _names(made: Sequence[Fingerprint]) -> list[str]:
    """Name each type by its device; by memory, family or a hash too, if that is not unique."""
    ways = [[_device_name(each) for each in made]]
    by_memory = [f"{name}-{each.memory_gib}gib" for name, each in zip(ways[0], made, strict=True)]
    ways.append(by_memory)
    ways.append([f"{_slug(e.family)}-{name}" for name, e in zip(by_memory, made, strict=True)])
    hashes = [hashlib.sha256(repr(each).encode()).hexdigest()[:8] for each in made]
    ways.append([f"{name}-{each}" for name, each in zip(ways[0], hashes, strict=True)])
    chosen = []
    for index in range(len(made)):
        unique = (way[index] for way in ways if way.count(way[index]) == 1)
        chosen.append(next(unique, ways[-1][index]))
    return chosen


def _device_name(made: Fingerprint) -> str:
    plain = re.sub(r"\((R|TM|C)\)|@.*|\bCPU\b|\bProcessor\b", " ", made.name, flags=re.IGNORECASE)
    parts = [_slug(plain) or _slug(made.family) or made.kind.value]
    if made.partition:
        parts.append(_slug(made.partition))
    if made.core_quota is not None:
        parts.append(f"{_slug(f'{made.core_quota:g}')}-cores")
    if made.rehearsal:
        parts.append("rehearsal")
    return "-".join(parts)


def _slug(text: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))
