"""What CUDA's driver library shows this process, as plain values.

It is exact where NVML is not: the order in which CUDA counts, the MIG instances it shows, and
machines without NVML (Jetson, containers without the `utility` capability).
"""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.core.codec import DecodeError, from_plain
from autoprec.hardware.machine import Machine

_MIG = " MIG "


@dataclass(frozen=True)
class CudaDevice:
    """One device in CUDA's order.

    `uuid` is without NVML's prefix; an `integrated` device has no memory of its own.
    """

    name: str = ""
    compute_capability: str = ""
    integrated: bool = False
    uuid: str = ""
    pci_bus: str = ""
    memory_bytes: int | None = None

    @property
    def model(self) -> str:
        """Return the GPU's name, such as "NVIDIA A100-SXM4-40GB", for an instance of it too."""
        return self.name.partition(_MIG)[0]

    @property
    def partition(self) -> str:
        """Return the part of its GPU, such as "3g.20gb"; "" for a whole one."""
        return self.name.partition(_MIG)[2]

    @property
    def identifier(self) -> str:
        """Return the identifier that CUDA_VISIBLE_DEVICES accepts."""
        prefix = "MIG-" if self.partition else "GPU-"
        return f"{prefix}{self.uuid}" if self.uuid else ""


@dataclass(frozen=True)
class CudaAnswer:
    """The driver's answer; `version` is CUDA's own, `error` says why there are no devices."""

    version: str = ""
    devices: tuple[CudaDevice, ...] = ()
    error: str = ""


def read_cuda(machine: Machine) -> CudaAnswer:
    """Ask CUDA's driver in a child process; takes about a second, more on large nodes."""
    try:
        return from_plain(CudaAnswer, machine.cuda())
    except DecodeError as error:
        return CudaAnswer(error=f"CUDA's driver gave an answer that could not be parsed: {error}")
