"""Records a machine: every question of a probe is passed on, and its answer kept."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from autoprec.core.codec import DecodeError, from_plain
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes.nvidia import CudaAnswer
from autoprec.hardware.probes.nvml import NvmlSnapshot, read_nvml
from benchmarks.recordings.machine_replay import Expectation, Package, Recording

T = TypeVar("T")

#: Other names in /dev are disks and volumes, some named by their owner.
_ACCELERATOR = re.compile(r"nv(idia|host|map|gpu)|dxg$|kfd$|accel")

#: What assigns a text to a name of the module. The rest of a package's file is its author's.
_STATED = re.compile(r"\w+\s*(:[^=]+)?=\s*['\"]")


class Recorder:
    """A `Machine` that passes every question on and records the answers."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.system = machine.system
        self.architecture = machine.architecture
        self.python = machine.python
        self._variables: dict[str, str] = {}
        self._files: dict[str, str] = {}
        self._folders: dict[str, tuple[str, ...]] = {}
        self._commands: dict[str, str] = {}
        self._packages: dict[str, Package] = {}
        self._answers: dict[str, Any] = {}
        self._uuids: dict[str, str] = {}

    def recording(self, note: str, expect: Expectation) -> Recording:
        """Return everything that was answered so far, without what identifies the owner."""
        return Recording(
            note=note,
            synthetic=False,
            expect=expect,
            system=self.system,
            architecture=self.architecture,
            python=self.python,
            variables={name: self._renamed(text) for name, text in self._variables.items()},
            files=_anonymous(self._files),
            folders=self._folders,
            commands=self._commands,
            packages=self._packages,
            **self._answers,
        )

    def _renamed(self, text: str) -> str:
        """Return a text with every GPU's UUID as the recording names it (CUDA_VISIBLE_DEVICES)."""
        for uuid, name in self._uuids.items():
            text = text.replace(uuid, name)
        return text

    def variable(self, name: str) -> str | None:
        """Pass the question on and record the answer."""
        return _keep(self._variables, name, self._machine.variable(name))

    def read(self, path: str) -> str | None:
        """Pass the question on and record the answer."""
        return _keep(self._files, path, self._machine.read(path))

    def entries(self, path: str) -> tuple[str, ...]:
        """Pass the question on and record the answer."""
        names = self._machine.entries(path)
        kept = tuple(name for name in names if path != "/dev" or _ACCELERATOR.match(name))
        return _keep(self._folders, path, kept or None) or ()

    def command(self, *words: str) -> str | None:
        """Pass the question on and record the answer."""
        return _keep(self._commands, " ".join(words), self._machine.command(*words))

    def processors(self) -> int | None:
        """Pass the question on and record the answer."""
        return _keep(self._answers, "processors", self._machine.processors())

    def usable_processors(self) -> int | None:
        """Pass the question on and record the answer."""
        return _keep(self._answers, "usable_processors", self._machine.usable_processors())

    def physical_memory(self) -> int | None:
        """Pass the question on and record the answer."""
        return _keep(self._answers, "physical_memory", self._machine.physical_memory())

    def tiles_permitted(self) -> bool | None:
        """Pass the question on and record the answer."""
        return _keep(self._answers, "tiles_permitted", self._machine.tiles_permitted())

    def cpuid(self) -> Mapping[str, Any]:
        """Pass the question on and record the answer."""
        return _keep(self._answers, "cpuid", self._machine.cpuid()) or {}

    def has_package(self, name: str) -> bool:
        """Pass the question on and record the answer."""
        found = self._machine.has_package(name)
        if found:
            self._packages.setdefault(name, Package())
        return found

    def package_file(self, name: str, path: str) -> str | None:
        """Pass the question on and record the answer: the lines that may state a version."""
        text = self._machine.package_file(name, path)
        if text is not None:
            package = self._packages.get(name, Package())
            stated = "".join(f"{line}\n" for line in text.splitlines() if _STATED.match(line))
            self._packages[name] = replace(package, files={**package.files, path: stated})
        return text

    def distribution_version(self, name: str) -> str | None:
        """Pass the question on and record the answer."""
        version = self._machine.distribution_version(name)
        if version is not None:
            self._packages[name] = replace(self._packages.get(name, Package()), version=version)
        return version

    def nvml(self) -> Any:
        """Pass the module on and record what it shows, with UUIDs replaced."""
        module = self._machine.nvml()
        snapshot = read_nvml(module)
        if snapshot.devices:
            renamed = _without_uuids(snapshot)
            self._uuids |= dict(zip(_uuids(snapshot), _uuids(renamed), strict=True))
            self._answers["nvml"] = renamed
        return module

    def cuda(self) -> Mapping[str, Any]:
        """Pass the question on and record the answer, with UUIDs replaced as NVML's are."""
        answer = self._machine.cuda()
        with contextlib.suppress(DecodeError):
            found = from_plain(CudaAnswer, answer)
            devices = tuple(
                replace(each, uuid=self._uuids.get(each.uuid, f"{i:08x}") if each.uuid else "")
                for i, each in enumerate(found.devices)
            )
            self._answers["cuda"] = replace(found, devices=devices)
        return answer


def _keep(answers: dict[str, Any], name: str, value: T) -> T:
    if value is not None:
        answers[name] = value
    return value


def _uuids(snapshot: NvmlSnapshot) -> list[str]:
    """Return every UUID of a snapshot as CUDA gives it, without the prefix."""
    found = [[gpu.uuid, *(part.uuid for part in gpu.instances)] for gpu in snapshot.devices]
    return [uuid.partition("-")[2] for uuids in found for uuid in uuids]


def _without_uuids(snapshot: NvmlSnapshot) -> NvmlSnapshot:
    devices = []
    for i, gpu in enumerate(snapshot.devices):
        parts = tuple(
            replace(part, uuid=f"MIG-{i:08x}-{j:04x}") for j, part in enumerate(gpu.instances)
        )
        devices.append(replace(gpu, uuid=f"GPU-{i:08x}", instances=parts))
    return replace(snapshot, devices=tuple(devices))


def _anonymous(files: Mapping[str, str]) -> dict[str, str]:
    """Rename control groups (they contain user and container names) and drop all other mounts."""
    paths = [line.split(":", 2)[-1] for line in files.get("/proc/self/cgroup", "").splitlines()]
    groups = list(dict.fromkeys(part for path in paths for part in path.split("/") if part))
    renamed = {name: f"group{i}" for i, name in enumerate(groups, 1)}
    kept = {}
    for path, content in files.items():
        text = content
        if path == "/proc/self/mountinfo":
            text = "".join(line for line in text.splitlines(True) if " - cgroup" in line)
        if path.startswith(("/proc/self/", "/sys/fs/cgroup")):
            path, text = _rename(path, renamed), _rename(text, renamed)  # noqa: PLW2901
        kept[path] = text
    return kept


def _rename(text: str, names: Mapping[str, str]) -> str:
    for name, new in names.items():
        text = re.sub(rf"(?<=/){re.escape(name)}(?=/|\s|$)", new, text)
    return text
