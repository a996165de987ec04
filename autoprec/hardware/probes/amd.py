"""AMD GPUs through the kernel's KFD topology, without any ROCm library.

Source: Linux kernel, drivers/gpu/drm/amd/amdkfd/kfd_topology.c: a node with simd_count > 0 is a
GPU; gfx_target_version is major * 10000 + minor * 100 + stepping. Frameworks number GPUs in the
order of the nodes, less those that amd_visibility.py hides.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoprec.core.device.facts import DeviceKind, Observation
from autoprec.core.probe_result import Unusable
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Seen
from autoprec.hardware.probes.amd_visibility import gpu_name, left_by_hip, left_by_rocr
from autoprec.hardware.probes.pci import asks, gpus_on_the_bus, nothing_shown

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_PUBLIC_HEAP, _PRIVATE_HEAP = "1", "2"
_VENDOR = "1002"
#: The kernel's driver of GPUs from before any ROCm.
_OLD_DRIVER = "radeon"
#: A GPU in a single partition.
_WHOLE = "SPX"
_LISTS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def probe_amd(machine: Machine) -> Seen:
    """Observe the AMD GPUs that ROCm would show this process."""
    nodes = sorted(machine.entries(_NODES), key=lambda name: (len(name), name))
    properties = [(node, _properties(machine, f"{_NODES}/{node}/properties")) for node in nodes]
    gpus = [(node, values) for node, values in properties if _number(values, "simd_count") > 0]
    if not gpus:
        return _driverless(machine)
    names = [gpu_name(_number(values, "unique_id")) for _, values in gpus]
    after_runtime = left_by_rocr(names, machine.variable("ROCR_VISIBLE_DEVICES"))
    hip = machine.variable("HIP_VISIBLE_DEVICES")
    chosen = hip if hip is not None else machine.variable("CUDA_VISIBLE_DEVICES")
    shown = left_by_hip([names[i] for i in after_runtime], chosen)
    devices = tuple(
        _observe(machine, index, ordinal, *gpus[after_runtime[ordinal]])
        for index, ordinal in enumerate(shown)
    )
    if not devices:
        said = f"environment variables hide all {len(gpus)} AMD GPUs"
        return nothing_shown(DeviceKind.ROCM, said, *map(machine.variable, _LISTS))
    return Seen(devices)


def amd_wanted(machine: Machine) -> bool:
    """Whether an AMD GPU is on the bus that ROCm could know, and is not hidden on purpose."""
    found = [gpu for gpu in gpus_on_the_bus(machine, _VENDOR) if gpu.driver != _OLD_DRIVER]
    return bool(found) and all(asks(machine.variable(name)) for name in _LISTS)


def _driverless(machine: Machine) -> Seen:
    """Without a node of KFD: no GPU, or one whose driver is missing."""
    if not amd_wanted(machine):
        return Seen()
    said = (
        "an AMD GPU is in this machine but cannot be used: the kernel's driver (amdgpu, with KFD) "
        "does not show it"
    )
    return Seen(unusable=(Unusable(DeviceKind.ROCM, said),))


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
        notes=("it is one node with the CPU, whose memory it shares",) if integrated else (),
    )


def _partition(machine: Machine, values: Mapping[str, str]) -> str:
    """How the GPU that a node belongs to is divided ("CPX/NPS4"), "" where it is whole.

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
    if compute in ("", _WHOLE):
        return ""
    return f"{compute}/{memory}" if memory else compute


def _gfx(version: int) -> str:
    """ "gfx90a" from 90010: the stepping is a hexadecimal digit."""
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
