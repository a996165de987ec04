"""What CUDA's driver library shows this process, as plain values.

It is exact where NVML is not: in which order CUDA counts, which MIG instances it shows, and on
machines that have no NVML (Jetson, containers without the `utility` capability).
"""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.core.codec import DecodeError, from_plain
from autoprec.hardware.machine import Machine

_MIG = " MIG "


@dataclass(frozen=True)
class CudaDevice:
    """One device in CUDA's order; `uuid` without NVML's prefix. `integrated`: no own memory."""

    name: str = ""
    compute_capability: str = ""
    integrated: bool = False
    uuid: str = ""
    pci_bus: str = ""
    memory_bytes: int | None = None

    @property
    def model(self) -> str:
        """The GPU's name: "NVIDIA A100-SXM4-40GB" also of its instance's, which adds the part."""
        return self.name.partition(_MIG)[0]

    @property
    def partition(self) -> str:
        """The part of its GPU: "3g.20gb", "" for a whole one."""
        return self.name.partition(_MIG)[2]

    @property
    def identifier(self) -> str:
        """The device as CUDA_VISIBLE_DEVICES takes it."""
        prefix = "MIG-" if self.partition else "GPU-"
        return f"{prefix}{self.uuid}" if self.uuid else ""


@dataclass(frozen=True)
class CudaAnswer:
    """Everything that was asked; `version` is CUDA's own, `error` says why there is nothing."""

    version: str = ""
    devices: tuple[CudaDevice, ...] = ()
    error: str = ""


def read_cuda(machine: Machine) -> CudaAnswer:
    """Ask CUDA's driver in a child process; takes a second or so, more on large nodes."""
    try:
        return from_plain(CudaAnswer, machine.cuda())
    except DecodeError as error:
        return CudaAnswer(error=f"CUDA's driver gave an answer that cannot be read: {error}")
