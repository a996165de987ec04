"""Apple silicon through sysctl: the CPU, and the GPU that Metal (kind mps) shows."""

from __future__ import annotations

from autoprec.core.device.facts import DeviceKind, Observation
from autoprec.core.probe_result import Unusable
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Seen

#: The implementer code that Arm assigned to Apple; Linux shows it, macOS does not.
_IMPLEMENTER = "0x61"
_NAMES = ("machdep.cpu.brand_string", "hw.memsize", "hw.physicalcpu", "hw.optional.arm")

#: 1 in a process that Rosetta translates; Intel Macs do not know the name.
#: Source: Apple developer documentation, "About the Rosetta translation environment".
_TRANSLATED = "sysctl.proc_translated"


def probe_apple(machine: Machine) -> Seen:
    """Observe the GPU of an Apple silicon Mac; it shares the CPU's memory."""
    if machine.system != "Darwin":
        return Seen()
    if machine.architecture != "arm64" and is_translated(machine):
        said = (
            "this Mac's GPU cannot be used: this Python is built for Intel, and Rosetta translates "
            "it. Install Python for arm64"
        )
        return Seen(unusable=(Unusable(DeviceKind.MPS, said),))
    if machine.architecture != "arm64":
        return Seen(notes=("an Intel Mac: PyTorch has no maintained build for its GPU",))
    found = _sysctl(machine, *_NAMES)
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
    found = _sysctl(machine, *_NAMES)
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


def is_translated(machine: Machine) -> bool:
    """Whether Rosetta translates this process, which is then slower than a native one."""
    return _sysctl(machine, _TRANSLATED).get(_TRANSLATED) == "1"


def _sysctl(machine: Machine, *names: str) -> dict[str, str]:
    text = "".join(machine.command("sysctl", name) or "" for name in names)
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}
