"""AMD GPUs through the kernel's KFD topology, without any ROCm library.

Source: Linux kernel, drivers/gpu/drm/amd/amdkfd/kfd_topology.c: a node with simd_count > 0 is a
GPU; gfx_target_version is major * 10000 + minor * 100 + stepping. Frameworks number GPUs in the
order of the nodes, less those that amd_visibility.py hides.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.probe_result import Unusable
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.amd_visibility import gpu_name, visible_to_hip, visible_to_rocr
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
    names = [gpu_name(_number(values, "unique_id")) for _, values in gpus]
    after_runtime = visible_to_rocr(names, machine.variable("ROCR_VISIBLE_DEVICES"))
    hip = machine.variable("HIP_VISIBLE_DEVICES")
    chosen = hip if hip is not None else machine.variable("CUDA_VISIBLE_DEVICES")
    shown = visible_to_hip([names[i] for i in after_runtime], chosen)
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
    found = [gpu for gpu in gpus_on_the_bus(machine, _VENDOR) if gpu.driver != _PRE_ROCM_DRIVER]
    return bool(found) and all(names_a_device(machine.variable(name)) for name in _VARIABLES)


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
