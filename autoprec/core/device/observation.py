"""What a probe found out about one device of this machine.

Nothing here looks at a machine or a file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

UNIFIED_MEMORY_NOTE = (
    "shares the CPU's memory: what a process may have of it is known only to the framework, which "
    "is asked when it runs"
)


class DeviceKind(StrEnum):
    """A kind of device."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    MPS = "mps"
    TPU = "tpu"

    @property
    def framework_name(self) -> str:
        """Return what frameworks call devices of this kind: ROCm's are "cuda", too."""
        return "cuda" if self is DeviceKind.ROCM else self.value


def kind_of_framework_device(name: str, present: Collection[DeviceKind]) -> str:
    """Return which kind of those present a framework means by `name`; `name` if it is none.

    Frameworks call the devices of both CUDA and ROCm "cuda".
    """
    named = (kind.value for kind in DeviceKind if kind in present and kind.framework_name == name)
    return next(named, name)


@dataclass(frozen=True)
class Observation:
    """What a probe found out about one device; everything but the kind may be missing.

    `features` are instruction-set flags as the system names them; `denied` are those advertised
    but not usable (AMX without tile permission), `unused` those that a setting makes libraries
    avoid. `partial_features`: the source does not list all, so a missing one proves nothing.
    `memory_bytes` is what may be used: the smaller of what is installed and what a limit leaves.
    `core_quota` is CPU time per second if a limit is set. `uuid` selects the device for a worker
    process: a UUID, for ROCm and TPU the ordinal that the visibility variable wants, for an Intel
    GPU its PCI address ("0000:03:00.0", of a tile "0000:29:00.0/1"). It is not part of a
    fingerprint. `partition` names the part of a device that is divided (MIG, vGPU, AMD's compute
    partitions, tiles). `rehearsal`: the machine only pretends to have this device, so that nothing
    timed on it means anything. `hypothetical`: nothing was probed; this is what a family's row says
    of a device that is not present.
    """

    kind: DeviceKind
    index: int = 0
    name: str = ""
    vendor: str = ""
    architecture: str = ""
    compute_capability: str = ""
    pci: str = ""
    pci_subsystem: str = ""
    cpu_family: int | None = None
    cpu_model: int | None = None
    implementer: str = ""
    part: str = ""
    board: str = ""
    features: frozenset[str] = frozenset()
    denied: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    partial_features: bool = False
    memory_bytes: int | None = None
    cores: int | None = None
    usable_cores: int | None = None
    core_quota: float | None = None
    uuid: str = ""
    driver: str = ""
    partition: str = ""
    notes: tuple[str, ...] = ()
    rehearsal: bool = False
    hypothetical: bool = False
