"""The CPU: from /proc/cpuinfo, from sysctl on macOS, from py-cpuinfo where both are absent."""

from __future__ import annotations

from collections.abc import Mapping

from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.apple import apple_cpu
from autoprec.hardware.probes.cpu_settings import setting_notes, unused_features
from autoprec.hardware.probes.memory import Limits, read_limits

_TILE_PREFIX = "amx"


def probe_cpu(machine: Machine) -> Findings:
    """Observe the CPU; there always is one, however little can be read about it."""
    limits = read_limits(machine)
    notes = _limit_notes(limits)
    found = apple_cpu(machine) if machine.system == "Darwin" else None
    if found is None:
        found = _from_proc(machine) or _from_cpuid(machine)
    if not found.features:
        notes = (*notes, "the CPU's features could not be read")
    features, denied = _split_tiles(machine, found.features)
    unused = unused_features(machine, features)
    usable = machine.usable_processors() or machine.processors()
    observation = Observation(
        kind=DeviceKind.CPU,
        name=found.name,
        vendor=found.vendor,
        architecture=machine.architecture.lower(),
        cpu_family=found.cpu_family,
        cpu_model=found.cpu_model,
        implementer=found.implementer,
        part=found.part,
        board=_board(machine),
        features=features,
        denied=denied,
        unused=unused,
        partial_features=found.partial_features,
        memory_bytes=limits.memory_bytes,
        cores=found.cores or machine.processors(),
        usable_cores=usable,
        core_quota=limits.core_quota,
        notes=(*notes, *setting_notes(machine, unused)),
    )
    return Findings((observation,))


def _limit_notes(limits: Limits) -> tuple[str, ...]:
    notes = []
    if limits.memory_bytes is None:
        notes.append("the size of the memory could not be read")
    elif limits.memory_limited:
        notes.append(f"a control group limits memory to {limits.memory_bytes / 2**30:.1f} GiB")
    if limits.core_quota is not None:
        notes.append(f"a control group limits CPU time to {limits.core_quota:g} cores")
    return tuple(notes)


def _split_tiles(
    machine: Machine, features: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Separate AMX where the kernel denies this process its tiles: a flag alone proves nothing."""
    tiles = frozenset(name for name in features if name.startswith(_TILE_PREFIX))
    if tiles and machine.tiles_permitted() is False:
        return features - tiles, tiles
    return features, frozenset()


def _from_proc(machine: Machine) -> Observation | None:
    blocks = [
        block
        for text in (machine.read("/proc/cpuinfo") or "").split("\n\n")
        if "processor" in (block := _fields(text))
    ]
    if not blocks:
        return None
    first = blocks[0]
    flags = [_flags(block) for block in blocks]
    cores = {(b.get("physical id"), b.get("core id", str(i))) for i, b in enumerate(blocks)}
    return Observation(
        kind=DeviceKind.CPU,
        name=" ".join(first.get("model name", "").split()),
        vendor=first.get("vendor_id", ""),
        cpu_family=_integer(first.get("cpu family")),
        cpu_model=_integer(first.get("model")),
        implementer=first.get("cpu implementer", ""),
        part=first.get("cpu part", ""),
        features=frozenset.intersection(*flags),
        cores=len(cores),
    )


def _fields(text: str) -> Mapping[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip().lower(): value.strip() for key, colon, value in pairs if colon}


def _flags(block: Mapping[str, str]) -> frozenset[str]:
    return frozenset((block.get("flags") or block.get("features") or "").lower().split())


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None


def _from_cpuid(machine: Machine) -> Observation:
    """Observe the CPU through py-cpuinfo, whose table knows neither AMX nor AVX512_BF16."""
    found = machine.cpuid()
    flags = found.get("flags")
    family, model = found.get("family"), found.get("model")
    return Observation(
        kind=DeviceKind.CPU,
        name=str(found.get("brand_raw", "")),
        vendor=str(found.get("vendor_id_raw", "")),
        cpu_family=family if isinstance(family, int) else None,
        cpu_model=model if isinstance(model, int) else None,
        features=frozenset(map(str, flags)) if isinstance(flags, list | tuple) else frozenset(),
        partial_features=True,
    )


def _board(machine: Machine) -> str:
    """Return the machine's maker and model, without any serial number."""
    names = ("sys_vendor", "product_name")
    parts = (machine.read(f"/sys/class/dmi/id/{name}") or "" for name in names)
    return " ".join(" ".join(parts).split())
