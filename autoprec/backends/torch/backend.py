"""PyTorch behind the seam: names it and hands out its session, tracer and surgeon."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping

import torch

from autoprec.backends.protocol import (
    DeviceMemory,
    ProgressCallback,
    Session,
    Surgeon,
    Task,
    Tracer,
)
from autoprec.backends.torch import xpu_devices
from autoprec.backends.torch.capabilities import CAPABILITIES
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.measurement import TaskFacts
from autoprec.core.recipe import Recipe


class TorchBackend:
    """See `autoprec.backends.protocol.Backend`."""

    name = "torch"
    capabilities = CAPABILITIES

    def versions(self) -> Mapping[str, str]:
        """Return the versions of Python, torch, and CUDA or ROCm where torch was built with it."""
        found = {"python": platform.python_version(), "torch": str(torch.__version__)}
        if torch.version.cuda:
            found["cuda"] = str(torch.version.cuda)
        if torch.version.hip:
            found["rocm"] = str(torch.version.hip)
        return found

    def devices(self) -> Iterable[str]:
        """List the accelerators torch can use here, then the CPU."""
        found = []
        if torch.cuda.is_available():
            found.append("cuda")
        if torch.xpu.is_available() and xpu_devices.select_assigned_device() is not None:
            found.append("xpu")
        if torch.backends.mps.is_available():
            found.append("mps")
        return [*found, "cpu"]

    def trains_on(self) -> Iterable[DeviceKind]:
        """List every kind but TPUs."""
        return tuple(kind for kind in DeviceKind if kind is not DeviceKind.TPU)

    def built_for(self) -> Iterable[DeviceKind]:
        """See `Backend.built_for`."""
        from autoprec.backends.torch.devices import built_for

        return built_for()

    def observe(self, device: str) -> Observation | None:
        """Return the properties torch knows of a CUDA, ROCm or Intel GPU."""
        from autoprec.backends.torch import devices

        return devices.observe(devices.resolve_device(device))

    def memory(self, device: str) -> DeviceMemory | None:
        """Read what is free on an accelerator from its own module of torch."""
        from autoprec.backends.torch import devices

        found = devices.resolve_device(device)
        free = devices.free_bytes(found)
        return None if free is None else DeviceMemory(free, devices.used_by_others(found) or 0)

    def missing_kernels(self, device: str) -> str:
        """Say whether oneDNN, which has a CPU's 16-bit products, is missing or switched off."""
        if torch.device(device).type != "cpu":
            return ""
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return "this build of PyTorch is without oneDNN (MKLDNN)"
        return "" if torch.backends.mkldnn.enabled else "torch.backends.mkldnn.enabled is False"

    def device_of(self, model: object) -> str:
        """Return the device of the model's first parameter; the CPU for one without parameters."""
        first = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
        return "cpu" if first is None else str(first.device)

    def describe(
        self, task: Task, *, device: str, seed: int, batch_size: int, report: ProgressCallback
    ) -> TaskFacts:
        """See `Backend.describe`."""
        from autoprec.backends.torch.measure.describe import describe

        return describe(
            task,
            device=device,
            seed=seed,
            batch_size=batch_size,
            report=report,
            software=self.versions(),
        )

    def open(
        self, task: Task, recipe: Recipe, *, device: str, seed: int, report: ProgressCallback
    ) -> Session:
        """See `Backend.open`."""
        from autoprec.backends.torch.measure.session import TorchSession

        return TorchSession(task, recipe, device=device, seed=seed, report=report)

    def with_rounded_vocabulary(self, task: Task, size: int, rounded: int) -> Task:
        """See `RoundingBackend.with_rounded_vocabulary`."""
        from autoprec.backends.torch.measure.rounded_vocabulary import with_rounded_vocabulary

        return with_rounded_vocabulary(task, size, rounded)

    def tracer(self, task: Task, *, device: str, seed: int, report: ProgressCallback) -> Tracer:
        """See `Backend.tracer`."""
        from autoprec.backends.torch.trace.tracer import torch_tracer

        return torch_tracer(task, device=device, seed=seed, report=report)

    def surgeon(self) -> Surgeon:
        """See `Backend.surgeon`."""
        from autoprec.backends.torch.surgeon import TorchSurgeon

        return TorchSurgeon()
