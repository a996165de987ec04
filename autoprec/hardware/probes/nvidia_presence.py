"""Whether an NVIDIA GPU is present, without any driver library: the bus, /proc, device files.

Sources: NVIDIA driver README, "The /proc file system interface" and "Device files" (nvidia0);
Jetson Linux developer guide (nvhost and nvgpu device files, nvmap); Microsoft, "GPU accelerated
machine learning in WSL" (/dev/dxg, and libcuda in /usr/lib/wsl/lib).
"""

from __future__ import annotations

import re

from autoprec.hardware.machine import Machine
from autoprec.hardware.probes.pci import gpus_on_the_bus, names_a_device

_VENDOR = "10de"
_FILES = re.compile(r"nvidia\d+|nvmap|nvgpu|nvhost-.*gpu.*")
_WSL_FOLDER = "/usr/lib/wsl/lib"


def nvidia_present(machine: Machine) -> bool:
    """Tell whether anything shows that this machine has an NVIDIA GPU."""
    if gpus_on_the_bus(machine, _VENDOR) or machine.entries("/proc/driver/nvidia/gpus"):
        return True
    files = machine.entries("/dev")
    if any(_FILES.fullmatch(name) for name in files):
        return True
    return "dxg" in files and "libcuda.so.1" in machine.entries(_WSL_FOLDER)


def nvidia_expected(machine: Machine) -> bool:
    """Tell whether an NVIDIA GPU is present and not hidden on purpose."""
    return nvidia_present(machine) and names_a_device(machine.variable("CUDA_VISIBLE_DEVICES"))


def driver_remark(machine: Machine) -> str:
    """Return a remark on GPUs that another driver than NVIDIA's holds; "" if there are none."""
    drivers = {gpu.driver for gpu in gpus_on_the_bus(machine, _VENDOR)}
    return "it uses the nouveau driver; install NVIDIA's driver" if "nouveau" in drivers else ""
