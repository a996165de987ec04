"""Recorded machines: what the probes read on one machine, to be replayed on any other.

A recording holds what was read, never what the probes concluded, so that a replay runs all of their
code. `expect` is the outcome that a person has checked; the file's name is the expected family. A
recording that no real machine produced is marked `synthetic`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.device.family import Support
from autoprec.core.dtypes import DType, Policy
from autoprec.hardware.probes.nvidia import CudaAnswer
from autoprec.hardware.probes.nvml import NvmlDevice, NvmlInstance, NvmlSnapshot

#: nvmlReturn_t: not supported, driver not loaded.
_NOT_SUPPORTED, _NO_DRIVER = 3, 9


@dataclass(frozen=True)
class Expectation:
    """What a replay must give for the first device: its dtype support and the first candidate."""

    policy: Policy
    support: Mapping[DType, Support] = field(default_factory=dict)


@dataclass(frozen=True)
class Package:
    """An installed Python package: the files a probe reads, and its distribution's version."""

    files: Mapping[str, str] = field(default_factory=dict)
    version: str = ""


@dataclass(frozen=True)
class Recording:
    """What a machine answered; whatever is missing here, it did not have."""

    note: str
    synthetic: bool
    expect: Expectation
    system: str = "Linux"
    architecture: str = "x86_64"
    python: str = "3.11.7"
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    processors: int | None = None
    usable_processors: int | None = None
    physical_memory: int | None = None
    tiles_permitted: bool | None = None
    cpuid: Mapping[str, object] = field(default_factory=dict)
    packages: Mapping[str, Package] = field(default_factory=dict)
    nvml: NvmlSnapshot | None = None
    cuda: CudaAnswer | None = None


def read_recording(path: Path) -> Recording:
    """Read a recording; raise `DecodeError` if it does not match the format."""
    return from_plain(Recording, json.loads(path.read_text(encoding="utf-8")))


class RecordedMachine:
    """A `Machine` that answers from a recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.system = recording.system
        self.architecture = recording.architecture
        self.python = recording.python

    def variable(self, name: str) -> str | None:
        """Return a recorded environment variable."""
        return self._recording.variables.get(name)

    def read(self, path: str) -> str | None:
        """Return a recorded file."""
        return self._recording.files.get(path)

    def entries(self, path: str) -> tuple[str, ...]:
        """List the recorded names in a folder, and those of the recorded files below it."""
        prefix = path.rstrip("/") + "/"
        files = (name for name in self._recording.files if name.startswith(prefix))
        names = {name[len(prefix) :].split("/")[0] for name in files}
        return tuple(sorted(names.union(self._recording.folders.get(path, ()))))

    def command(self, *words: str) -> str | None:
        """Return what a command printed."""
        return self._recording.commands.get(" ".join(words))

    def processors(self) -> int | None:
        """Return the number of logical processors."""
        return self._recording.processors

    def usable_processors(self) -> int | None:
        """Return how many processors the process could run on."""
        return self._recording.usable_processors

    def physical_memory(self) -> int | None:
        """Return the installed memory in bytes."""
        return self._recording.physical_memory

    def tiles_permitted(self) -> bool | None:
        """Tell whether AMX tiles were permitted."""
        return self._recording.tiles_permitted

    def cpuid(self) -> Mapping[str, Any]:
        """Return py-cpuinfo's answer."""
        return self._recording.cpuid

    def has_package(self, name: str) -> bool:
        """Tell whether a package was installed."""
        return name in self._recording.packages

    def package_file(self, name: str, path: str) -> str | None:
        """Return a file of an installed package."""
        package = self._recording.packages.get(name)
        return package.files.get(path) if package else None

    def distribution_version(self, name: str) -> str | None:
        """Return the version of an installed distribution."""
        package = self._recording.packages.get(name)
        return package.version or None if package else None

    def nvml(self) -> Any:
        """Return a replacement for the pynvml module."""
        return NvmlReplay(self._recording.nvml)

    def cuda(self) -> Mapping[str, Any]:
        """Return what CUDA's driver showed."""
        answer = self._recording.cuda or CudaAnswer(error="libcuda.so.1: no such file")
        found: Mapping[str, Any] = to_plain(answer)
        return found


def synthetic_machine(**answers: Any) -> RecordedMachine:
    """Make a machine that has what is given and nothing else, for tests; keys as in `Recording`."""
    return RecordedMachine(Recording("", True, Expectation(Policy.FLOAT32), **answers))


class NvmlError(Exception):
    """The error that NVML raises, with its return code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class NvmlReplay:
    """The part of pynvml that the probe calls, answered from a snapshot."""

    def __init__(self, snapshot: NvmlSnapshot | None) -> None:
        self._snapshot = snapshot

    def __getattr__(self, name: str) -> Any:
        if self._snapshot is None:
            raise NvmlError(_NO_DRIVER)
        answer = _ANSWERS[name]
        return lambda *arguments: answer(self._snapshot, *arguments)


def _memory(_: NvmlSnapshot, handle: NvmlDevice | NvmlInstance) -> SimpleNamespace:
    return SimpleNamespace(total=_known(handle.memory_bytes))


def _known(value: Any) -> Any:
    if value is None or value == "":
        raise NvmlError(_NOT_SUPPORTED)
    return value


def _capability(_: NvmlSnapshot, handle: NvmlDevice) -> tuple[int, int]:
    major, minor = _known(handle.compute_capability).split(".")
    return int(major), int(minor)


_ANSWERS: Mapping[str, Any] = {
    "nvmlInit": lambda _: None,
    "nvmlShutdown": lambda _: None,
    "nvmlSystemGetDriverVersion": lambda snapshot: snapshot.driver,
    "nvmlDeviceGetCount": lambda snapshot: len(snapshot.devices),
    "nvmlDeviceGetHandleByIndex": lambda snapshot, index: snapshot.devices[index],
    "nvmlDeviceGetName": lambda _, handle: handle.name.encode(),
    "nvmlDeviceGetUUID": lambda _, handle: handle.uuid.encode(),
    "nvmlDeviceGetCudaComputeCapability": _capability,
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetMigMode": lambda _, handle: (int(handle.mig), int(handle.mig)),
    "nvmlDeviceGetVirtualizationMode": lambda _, handle: 2 if handle.virtual else 0,
    "nvmlDeviceGetMaxMigDeviceCount": lambda _, handle: len(handle.instances),
    "nvmlDeviceGetMigDeviceHandleByIndex": lambda _, handle, index: handle.instances[index],
}
