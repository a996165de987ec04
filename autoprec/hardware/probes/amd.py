"""AMD GPUs through the kernel's KFD topology, without any ROCm library.

Source: Linux kernel, drivers/gpu/drm/amd/amdkfd/kfd_topology.c: a node with simd_count > 0 is a
GPU; gfx_target_version is major * 10000 + minor * 100 + stepping. Frameworks number GPUs in the
order of the nodes, less those that amd_visibility.py hides.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoprec.core.device import DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Seen
from autoprec.hardware.probes.amd_visibility import gpu_name, left_by_hip, left_by_rocr

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_PUBLIC_HEAP, _PRIVATE_HEAP = "1", "2"


def probe_amd(machine: Machine) -> Seen:
    """Observe the AMD GPUs that ROCm would show this process."""
    nodes = sorted(machine.entries(_NODES), key=lambda name: (len(name), name))
    properties = [(node, _properties(machine, f"{_NODES}/{node}/properties")) for node in nodes]
    gpus = [(node, values) for node, values in properties if _number(values, "simd_count") > 0]
    if not gpus:
        return Seen()
    names = [gpu_name(_number(values, "unique_id")) for _, values in gpus]
    after_runtime = left_by_rocr(names, machine.variable("ROCR_VISIBLE_DEVICES"))
    hip = machine.variable("HIP_VISIBLE_DEVICES")
    chosen = hip if hip is not None else machine.variable("CUDA_VISIBLE_DEVICES")
    shown = left_by_hip([names[i] for i in after_runtime], chosen)
    devices = tuple(
        _observe(machine, index, ordinal, *gpus[after_runtime[ordinal]])
        for index, ordinal in enumerate(shown)
    )
    hidden = () if devices else (f"environment variables hide all {len(gpus)} AMD GPUs",)
    return Seen(devices, hidden)


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
        notes=("it is one node with the CPU, whose memory it shares",) if integrated else (),
    )


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
