"""Signs of an NVIDIA GPU that need no driver's library: the bus, /proc, and device files.

Sources: NVIDIA driver README, "The /proc file system interface" and "Device files" (nvidia0);
Jetson Linux developer guide (nvhost and nvgpu device files, nvmap); Microsoft, "GPU accelerated
machine learning in WSL" (/dev/dxg, and libcuda in /usr/lib/wsl/lib).
"""

from __future__ import annotations

import re

from autoprec.hardware.machine import Machine
from autoprec.hardware.probes.pci import asks, gpus_on_the_bus

_VENDOR = "10de"
_FILES = re.compile(r"nvidia\d+|nvmap|nvgpu|nvhost-.*gpu.*")
_WSL_FOLDER = "/usr/lib/wsl/lib"


def nvidia_present(machine: Machine) -> bool:
    """Whether anything shows that an NVIDIA GPU is here."""
    if gpus_on_the_bus(machine, _VENDOR) or machine.entries("/proc/driver/nvidia/gpus"):
        return True
    files = machine.entries("/dev")
    if any(_FILES.fullmatch(name) for name in files):
        return True
    return "dxg" in files and "libcuda.so.1" in machine.entries(_WSL_FOLDER)


def nvidia_wanted(machine: Machine) -> bool:
    """Whether one is here and not hidden on purpose."""
    return nvidia_present(machine) and asks(machine.variable("CUDA_VISIBLE_DEVICES"))


def without_its_driver(machine: Machine) -> str:
    """A remark on GPUs that another driver than NVIDIA's holds, "" where there is none."""
    drivers = {gpu.driver for gpu in gpus_on_the_bus(machine, _VENDOR)}
    return "the kernel's nouveau drives it, install NVIDIA's driver" if "nouveau" in drivers else ""
