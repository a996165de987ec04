"""What autoprec's probes see of a machine with a pretended GPU that NVML does not show.

NVIDIA's are shown by the module pynvml beside this package, and are on the bus. AMD's, Intel's and
Apple's are read from files and commands, which are answered here (synthetic, in the form of the
kernel's and sysctl's).
"""

from __future__ import annotations

from typing import Any

from pretended import settings

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_PCI = "/sys/bus/pci/devices"


def _amd() -> dict[str, str]:
    files = {}
    for number, gpu in enumerate(settings.MACHINE, 1):
        node = f"{_NODES}/{number}"
        files[f"{node}/properties"] = (
            "simd_count 1216\ngfx_target_version 90402\nvendor_id 4098\ndevice_id 29857\n"
        )
        files[f"{node}/name"] = gpu["name"]
        files[f"{node}/mem_banks/0/properties"] = f"heap_type 1\nsize_in_bytes {gpu['bytes']}\n"
    return files


def _intel() -> dict[str, str]:
    files = {}
    for number, gpu in enumerate(settings.MACHINE):
        place = f"{_PCI}/0000:0{number + 3}:00.0"
        files |= {f"{place}/vendor": "0x8086", f"{place}/device": "0x" + gpu["pci"]}
        files[f"{place}/class"] = "0x030000"
    return files


def _nvidia() -> dict[str, str]:
    files = {}
    for number, _ in enumerate(settings.MACHINE if settings.GIVEN["nvml"] else (), 1):
        place = f"{_PCI}/0000:0{number}:00.0"
        files |= {f"{place}/vendor": "0x10de", f"{place}/class": "0x030200"}
        files[f"{place}/uevent"] = "DRIVER=nvidia\n"
    return files


def _cuda() -> dict[str, Any]:
    """What CUDA's driver library would show: the visible GPUs, in CUDA's order."""
    if settings.KIND != "cuda":
        return {"error": "libcuda.so.1: no such file"}
    devices = [
        {
            "name": gpu["name"],
            "compute_capability": gpu["capability"],
            "uuid": gpu["uuid"].removeprefix("GPU-"),
            "memory_bytes": gpu["bytes"],
        }
        for gpu in settings.GPUS
    ]
    return {"version": "13.0", "devices": devices}


def _apple() -> dict[str, str]:
    gpu = settings.MACHINE[0]
    return {
        "machdep.cpu.brand_string": gpu["name"],
        "hw.memsize": str(gpu["bytes"]),
        "hw.physicalcpu": "8",
        "hw.optional.arm": "1",
    }


def install(module: Any) -> None:
    """Put the answers over those of autoprec.hardware.machine's Machine."""
    local = module.Machine
    if settings.KIND == "mps":
        answers = _apple()
        local.system, local.architecture = "Darwin", "arm64"
        local.command = lambda self, *words: (
            f"{words[1]}: {answers[words[1]]}\n" if words[1:] and words[1] in answers else None
        )
        return
    local.cuda = lambda self: _cuda()
    files = {"cuda": _nvidia, "rocm": _amd, "xpu": _intel}[settings.KIND]()
    read, entries = local.read, local.entries

    def listed(self: Any, path: str) -> tuple[str, ...]:
        below = {
            name[len(path) + 1 :].split("/")[0] for name in files if name.startswith(path + "/")
        }
        return tuple(sorted({*entries(self, path), *below}))

    local.read = lambda self, path: files[path] if path in files else read(self, path)
    local.entries = listed
