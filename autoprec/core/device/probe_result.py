"""What `autoprec probe` answers, as one frozen value: devices, frameworks, notes."""

from dataclasses import dataclass

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.policies import Proposal


@dataclass(frozen=True)
class FrameworkFact:
    """A framework found on this machine without importing it; `build` as its version file says."""

    name: str
    version: str
    build: str = ""


@dataclass(frozen=True)
class DeviceReport:
    """One device: what is known of it, and what that makes plausible."""

    facts: DeviceFacts
    proposal: Proposal


@dataclass(frozen=True)
class Unusable:
    """An accelerator that is in the machine, is not hidden on purpose, and cannot be used.

    `text` is a sentence: which, and why.
    """

    kind: DeviceKind
    text: str


@dataclass(frozen=True)
class MachineObservation:
    """Everything the probes saw: accelerators first, the CPU last."""

    devices: tuple[Observation, ...]
    frameworks: tuple[FrameworkFact, ...] = ()
    notes: tuple[str, ...] = ()
    unusable: tuple[Unusable, ...] = ()
    system: str = ""
    python: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """What this machine has, what it is good at, and why: accelerators first, the CPU last."""

    devices: tuple[DeviceReport, ...]
    frameworks: tuple[FrameworkFact, ...] = ()
    notes: tuple[str, ...] = ()
    unusable: tuple[Unusable, ...] = ()
    system: str = ""
    python: str = ""

    @property
    def facts(self) -> tuple[DeviceFacts, ...]:
        """Return what is known of each device."""
        return tuple(each.facts for each in self.devices)

    @property
    def frameworks_installed(self) -> dict[str, str]:
        """Return the versions of the frameworks, by name."""
        return {each.name: each.version for each in self.frameworks}

    @property
    def software(self) -> dict[str, str]:
        """Return the versions of the frameworks and of Python, by name."""
        return {**self.frameworks_installed, "python": self.python}
