"""What is known of a device: observation, catalogue and measurements merged (see `merging`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import DType

GIB = 2**30

REPEATED_TIMINGS_RATIO = 1.2
"""Repeated measurements of one product differ by up to a fifth, minutes apart by more."""


class Evidence(StrEnum):
    """How something is known; each beats the ones before it."""

    CATALOGUE = "catalogue"
    PROBED = "probed"
    MEASURED = "measured"


@dataclass(frozen=True)
class DTypeFact:
    """What is known of one dtype on one device, and how it is known.

    `family_ratio` is how many times as fast as float32's its products were on another device of the
    family, if that was measured. Timings of a product went from `slowest_gflops` to
    `measured_gflops`; None if that was not recorded. `earlier_ratio` is how many times as fast
    as float32's they were when the same software timed this device before, if it did.
    """

    support: Support = Support.UNKNOWN
    evidence: Evidence = Evidence.CATALOGUE
    reason: str = ""
    alignment: int = 1
    best_alignment: int = 1
    peak_dense_tflops: float | None = None
    measured_gflops: float | None = None
    family_ratio: float | None = None
    slowest_gflops: float | None = None
    earlier_ratio: float | None = None

    @property
    def slowed(self) -> float:
        """Return the slowest timing's speed as a share of the fastest one's; 1 if unknown."""
        return (self.slowest_gflops or 0.0) / (self.measured_gflops or 1.0) or 1.0


@dataclass(frozen=True)
class Fingerprint:
    """What makes two devices the same for a profile: no serial numbers, no addresses.

    `memory_gib` is 0 if the memory is not known. `partition` is the part of a divided device, ""
    for a whole one; None if it was not told, as in profiles from before it was.
    """

    kind: DeviceKind
    family: str
    name: str
    memory_gib: int
    core_quota: float | None = None
    rehearsal: bool = False
    partition: str | None = None


@dataclass(frozen=True)
class DeviceFacts:
    """Everything known of one device: observation and family merged.

    Memory bandwidths are in GB/s (10^9 bytes), the catalogue's being the vendor's peak and the
    measured one counting bytes read and written. `measured_with` is the framework that this device
    was timed with, "" if it was not; `measured_on` the day, if that was earlier. `disturbed`: other
    processes used it meanwhile, so that it may be many times as fast.
    """

    observation: Observation
    family: str
    title: str
    dtypes: Mapping[DType, DTypeFact]
    source: tuple[str, ...] = ()
    memory_bandwidth_gbps: float | None = None
    measured_memory_bandwidth_gbps: float | None = None
    measured_with: str = ""
    measured_on: str = ""
    disturbed: bool = False
    notes: tuple[str, ...] = ()
    padding: bool = True
    origin: str = ""

    @property
    def kind(self) -> DeviceKind:
        """Return the kind of device."""
        return self.observation.kind

    @property
    def name(self) -> str:
        """Return the device's own name, else its family's title."""
        return self.observation.name or self.title

    @property
    def address(self) -> str:
        """Return the device as a user names it: "cpu", "cuda:1"."""
        if self.kind in (DeviceKind.CPU, DeviceKind.MPS):
            return self.kind.value
        return f"{self.kind.value}:{self.observation.index}"

    @property
    def identity(self) -> str:
        """Return what identifies the device on this machine in every process.

        Visibility variables renumber devices, so "cuda:0" may be two devices in two processes.
        """
        uuid = self.observation.uuid
        return f"{self.kind.value}:{uuid}" if uuid else self.address

    def fact(self, dtype: DType) -> DTypeFact:
        """Return what is known of `dtype`; support unknown if nothing is."""
        return self.dtypes.get(dtype, DTypeFact())

    def alignment(self, dtype: DType) -> int:
        """Return the least multiple, in elements, that suits matrix dimensions of `dtype`."""
        return self.fact(dtype).alignment

    def measured_ratio(self, dtype: DType) -> float | None:
        """Measured speed of a product in `dtype` over float32's, if both were measured."""
        mine = self.fact(dtype).measured_gflops
        base = self.fact(DType.FLOAT32).measured_gflops
        return mine / base if mine is not None and base else None

    def measured_range(self, dtype: DType) -> tuple[float, float] | None:
        """Return from where to where that ratio may be, as far as the timings can tell.

        It is at least `REPEATED_TIMINGS_RATIO` both ways, also if no spread was recorded, and
        contains what an earlier timing of this device gave.
        """
        ratio = self.measured_ratio(dtype)
        mine, base = self.fact(dtype), self.fact(DType.FLOAT32)
        if ratio is None:
            return None
        least = 1.0 / REPEATED_TIMINGS_RATIO
        low, high = ratio * min(mine.slowed, least), ratio / min(base.slowed, least)
        earlier = mine.earlier_ratio or ratio
        return min(low, earlier), max(high, earlier)

    @property
    def fingerprint(self) -> Fingerprint:
        """Return what a profile is matched by."""
        observed = self.observation
        memory = round((observed.memory_bytes or 0) / GIB)
        return Fingerprint(
            self.kind,
            self.family,
            self.name,
            memory,
            observed.core_quota,
            observed.rehearsal,
            observed.partition,
        )
