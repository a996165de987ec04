"""Apple silicon through sysctl: the CPU, and the GPU that Metal (kind mps) shows."""

from __future__ import annotations

from autoprec.core.device import DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Seen

#: The implementer code that Arm assigned to Apple; Linux shows it, macOS does not.
_IMPLEMENTER = "0x61"
_NAMES = ("machdep.cpu.brand_string", "hw.memsize", "hw.physicalcpu", "hw.optional.arm")


def probe_apple(machine: Machine) -> Seen:
    """Observe the GPU of an Apple silicon Mac; it shares the CPU's memory."""
    if machine.system != "Darwin":
        return Seen()
    if machine.architecture != "arm64":
        return Seen(notes=("an Intel Mac: PyTorch has no maintained build for its GPU",))
    found = _sysctl(machine)
    memory = found.get("hw.memsize", "")
    observation = Observation(
        kind=DeviceKind.MPS,
        name=found.get("machdep.cpu.brand_string", ""),
        vendor="Apple",
        architecture=machine.architecture,
        memory_bytes=int(memory) if memory.isdigit() else machine.physical_memory(),
    )
    return Seen((observation,))


def apple_cpu(machine: Machine) -> Observation | None:
    """What sysctl says of the CPU; None where it says nothing or the Mac is an Intel one."""
    found = _sysctl(machine)
    if not found or machine.architecture != "arm64":
        return None
    prefix = "hw.optional.arm.FEAT_"
    features = (
        key.removeprefix(prefix).lower()
        for key, on in found.items()
        if key.startswith(prefix) and on == "1"
    )
    cores = found.get("hw.physicalcpu", "")
    return Observation(
        kind=DeviceKind.CPU,
        name=found.get("machdep.cpu.brand_string", ""),
        vendor="Apple",
        implementer=_IMPLEMENTER,
        features=frozenset(features),
        cores=int(cores) if cores.isdigit() else None,
    )


def _sysctl(machine: Machine) -> dict[str, str]:
    text = "".join(machine.command("sysctl", name) or "" for name in _NAMES)
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}
