"""AMD GPUs through the kernel's KFD topology, without any ROCm library.

Source: Linux kernel, drivers/gpu/drm/amd/amdkfd/kfd_topology.c: a node with simd_count > 0 is a
GPU; gfx_target_version is major * 10000 + minor * 100 + stepping. Frameworks number GPUs in the
order of the nodes, less those that ROCR_VISIBLE_DEVICES hides and then HIP_VISIBLE_DEVICES: the two
differ from each other in every detail, and from CUDA. Sources of that, ROCm 6 and 7: ROCR-Runtime,
runtime/hsa-runtime/core/runtime/amd_filter_device.cpp and core/util/flag.h; HIP: clr,
rocclr/device/rocm/rocdevice.cpp (`Device::init`) and rocclr/utils/flags.cpp (`Flag::init`, which
reads a variable that is set but empty as one blank).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.probe_result import Unusable
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.pci import gpus_on_the_bus, names_a_device, no_visible_device

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_PUBLIC_HEAP, _PRIVATE_HEAP = "1", "2"
_VENDOR = "1002"
#: The kernel's driver for GPUs that no ROCm supports.
_PRE_ROCM_DRIVER = "radeon"
#: The compute partition of an undivided GPU.
_UNDIVIDED = "SPX"
_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def probe_amd(machine: Machine) -> Findings:
    """Observe the AMD GPUs that ROCm would show this process."""
    nodes = sorted(machine.entries(_NODES), key=lambda name: (len(name), name))
    properties = [(node, _properties(machine, f"{_NODES}/{node}/properties")) for node in nodes]
    gpus = [(node, values) for node, values in properties if _number(values, "simd_count") > 0]
    if not gpus:
        return _driverless(machine)
    names = [_gpu_name(_number(values, "unique_id")) for _, values in gpus]
    after_runtime = _visible_to_rocr(names, machine.variable("ROCR_VISIBLE_DEVICES"))
    hip = machine.variable("HIP_VISIBLE_DEVICES")
    chosen = hip if hip is not None else machine.variable("CUDA_VISIBLE_DEVICES")
    shown = _visible_to_hip([names[i] for i in after_runtime], chosen)
    devices = tuple(
        _observe(machine, index, ordinal, *gpus[after_runtime[ordinal]])
        for index, ordinal in enumerate(shown)
    )
    if not devices:
        said = f"environment variables hide all {len(gpus)} AMD GPUs"
        return no_visible_device(DeviceKind.ROCM, said, *map(machine.variable, _VARIABLES))
    return Findings(devices)


def amd_expected(machine: Machine) -> bool:
    """Return whether the bus has an AMD GPU that ROCm could support and that is not hidden."""
    gpus = [gpu for gpu in gpus_on_the_bus(machine, _VENDOR) if gpu.driver != _PRE_ROCM_DRIVER]
    return bool(gpus) and all(names_a_device(machine.variable(name)) for name in _VARIABLES)


def _driverless(machine: Machine) -> Findings:
    """Report on a machine without KFD nodes: it has no GPU, or one whose driver is missing."""
    if not amd_expected(machine):
        return Findings()
    said = (
        "this machine has an AMD GPU that cannot be used: the kernel's driver (amdgpu, with KFD) "
        "does not show it"
    )
    return Findings(unusable=(Unusable(DeviceKind.ROCM, said),))


def _observe(
    machine: Machine, index: int, ordinal: int, node: str, values: Mapping[str, str]
) -> Observation:
    integrated = _number(values, "cpu_cores_count") > 0
    return Observation(
        kind=DeviceKind.ROCM,
        index=index,
        name=_product(machine, values) or (machine.read(f"{_NODES}/{node}/name") or "").strip(),
        vendor="AMD",
        architecture=_gfx(_number(values, "gfx_target_version")),
        pci=f"{_number(values, 'vendor_id'):04x}:{_number(values, 'device_id'):04x}",
        memory_bytes=None if integrated else _memory(machine, node),
        uuid=str(ordinal),
        partition=_partition(machine, values),
        notes=("it shares the CPU's memory",) if integrated else (),
    )


def _partition(machine: Machine, values: Mapping[str, str]) -> str:
    """Return how the GPU of a node is partitioned ("CPX/NPS4"), "" for an undivided one.

    Source: Linux kernel, drivers/gpu/drm/amd/amdgpu/amdgpu_gfx.c (current_compute_partition). The
    nodes of one GPU share its bus and device numbers in location_id; newer kernels put the
    partition's number into the other bits.
    """
    location = _number(values, "location_id")
    address = (
        f"{_number(values, 'domain'):04x}:{location >> 8 & 255:02x}:{location >> 3 & 31:02x}.0"
    )
    compute, memory = (
        (machine.read(f"/sys/bus/pci/devices/{address}/current_{each}_partition") or "").strip()
        for each in ("compute", "memory")
    )
    if compute in ("", _UNDIVIDED):
        return ""
    return f"{compute}/{memory}" if memory else compute


def _gfx(version: int) -> str:
    """Return "gfx90a" for 90010: the stepping is a hexadecimal digit."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor}{stepping:x}" if version else ""


def _product(machine: Machine, values: Mapping[str, str]) -> str:
    minor = _number(values, "drm_render_minor")
    path = f"/sys/class/drm/renderD{minor}/device/product_name"
    return (machine.read(path) or "").strip() if minor else ""


def _memory(machine: Machine, node: str) -> int | None:
    folder = f"{_NODES}/{node}/mem_banks"
    total = 0
    for bank in machine.entries(folder):
        values = _properties(machine, f"{folder}/{bank}/properties")
        if values.get("heap_type") in (_PUBLIC_HEAP, _PRIVATE_HEAP):
            total += _number(values, "size_in_bytes")
    return total or None


def _properties(machine: Machine, path: str) -> Mapping[str, str]:
    lines = (line.split() for line in (machine.read(path) or "").splitlines())
    return {words[0]: words[1] for words in lines if len(words) == 2}


def _number(values: Mapping[str, str], key: str) -> int:
    text = values.get(key, "")
    return int(text) if text.isascii() and text.isdigit() else 0


# Visibility -------------------------------------------------------------------------------------

_PREFIX = "GPU-"
#: The runtime's name for a GPU without a unique id; HIP finds the GPU by it, ROCR does not.
_NAMELESS = "GPU-XX"
#: The lengths of a full or abbreviated identifier that ROCR accepts.
_SHORTEST, _LONGEST = 5, 20
#: What C's strtol reads to the end with base 0.
_INTEGER = re.compile(r"[+-]?(0x[0-9a-f]+|[0-9]+)", re.IGNORECASE)


def _gpu_name(unique_id: int) -> str:
    """Name a GPU as the runtime does: "GPU-" and 16 hexadecimal digits of KFD's `unique_id`."""
    return f"{_PREFIX}{unique_id:016x}" if unique_id else _NAMELESS


def _visible_to_rocr(names: Sequence[str], text: str | None) -> tuple[int, ...]:
    """Return the ordinals of the GPUs that ROCR_VISIBLE_DEVICES shows, in its order.

    Unset shows all, empty none. An entry is an integer as in C, or the beginning of exactly one
    GPU's identifier, in upper or lower case. The first entry that is neither, or repeats an
    earlier one, ends the list.
    """
    if text is None:
        return tuple(range(len(names)))
    kept: list[int] = []
    for entry in text.split(","):
        ordinal = _rocr_ordinal(names, entry.strip().upper())
        if ordinal in kept or not 0 <= ordinal < len(names):
            break
        kept.append(ordinal)
    return tuple(kept)


def _rocr_ordinal(names: Sequence[str], entry: str) -> int:
    if entry.startswith("G"):
        named = [name.upper() if name != _NAMELESS else "" for name in names]
        matching = [i for i, name in enumerate(named) if name.startswith(entry)]
        return matching[0] if _SHORTEST <= len(entry) <= _LONGEST and len(matching) == 1 else -1
    if not _INTEGER.fullmatch(entry):
        return -1
    digits = entry.lstrip("+-").lower()
    octal = digits.startswith("0") and not digits.startswith("0x")
    if octal and not set(digits) <= set("01234567"):
        return -1
    number = int(digits, 8 if octal else 0)
    return -number if entry.startswith("-") else number


def _visible_to_hip(names: Sequence[str], text: str | None) -> tuple[int, ...]:
    """Return the ordinals of the GPUs that HIP_VISIBLE_DEVICES shows (or CUDA_VISIBLE_DEVICES).

    Unset shows all, empty and "-1" show none. An entry is a plain decimal number without blanks or
    leading zeros, or an identifier: if several GPUs match, HIP takes the first. Anything else ends
    the list; a repeated entry is skipped.
    """
    if text is None:
        return tuple(range(len(names)))
    kept: dict[int, None] = {}
    for entry in text.split(","):
        ordinal = _hip_ordinal(names, entry)
        if ordinal is None:
            break
        kept[ordinal] = None
    return tuple(kept)


def _hip_ordinal(names: Sequence[str], entry: str) -> int | None:
    if _PREFIX in entry:
        return next((i for i, name in enumerate(names) if entry in name), None)
    return next((i for i in range(len(names)) if entry == str(i)), None)
