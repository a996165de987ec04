"""Apple silicon through sysctl: the CPU, and the GPU that Metal (kind mps) shows."""

from __future__ import annotations

from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.probe_result import Unusable
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings

#: The implementer code that Arm assigned to Apple; Linux shows it, macOS does not.
_IMPLEMENTER = "0x61"
_SYSCTL_NAMES = ("machdep.cpu.brand_string", "hw.memsize", "hw.physicalcpu", "hw.optional.arm")

#: 1 in a process that Rosetta translates; Intel Macs do not have it.
#: Source: Apple developer documentation, "About the Rosetta translation environment".
_TRANSLATED = "sysctl.proc_translated"


def probe_apple(machine: Machine) -> Findings:
    """Observe the GPU of an Apple silicon Mac; it shares the CPU's memory."""
    if machine.system != "Darwin":
        return Findings()
    if machine.architecture != "arm64" and is_translated(machine):
        said = (
            "this Mac's GPU cannot be used: this Python is built for Intel and runs under Rosetta. "
            "Install Python for arm64"
        )
        return Findings(unusable=(Unusable(DeviceKind.MPS, said),))
    if machine.architecture != "arm64":
        return Findings(notes=("an Intel Mac: PyTorch has no maintained build for its GPU",))
    values = _sysctl(machine, *_SYSCTL_NAMES)
    memory = values.get("hw.memsize", "")
    observation = Observation(
        kind=DeviceKind.MPS,
        name=values.get("machdep.cpu.brand_string", ""),
        vendor="Apple",
        architecture=machine.architecture,
        memory_bytes=int(memory) if memory.isdigit() else machine.physical_memory(),
    )
    return Findings((observation,))


def apple_cpu(machine: Machine) -> Observation | None:
    """Observe the CPU through sysctl; None if that shows nothing, or on an Intel Mac."""
    values = _sysctl(machine, *_SYSCTL_NAMES)
    if not values or machine.architecture != "arm64":
        return None
    prefix = "hw.optional.arm.FEAT_"
    features = (
        key.removeprefix(prefix).lower()
        for key, on in values.items()
        if key.startswith(prefix) and on == "1"
    )
    cores = values.get("hw.physicalcpu", "")
    return Observation(
        kind=DeviceKind.CPU,
        name=values.get("machdep.cpu.brand_string", ""),
        vendor="Apple",
        implementer=_IMPLEMENTER,
        features=frozenset(features),
        cores=int(cores) if cores.isdigit() else None,
    )


def is_translated(machine: Machine) -> bool:
    """Return whether Rosetta translates this process, which makes it slower than a native one."""
    return _sysctl(machine, _TRANSLATED).get(_TRANSLATED) == "1"


def _sysctl(machine: Machine, *names: str) -> dict[str, str]:
    text = "".join(machine.command("sysctl", name) or "" for name in names)
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}
