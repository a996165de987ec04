"""Which frameworks are installed and their versions, without importing any of them.

A framework is detected by its package: distributions have many names (tensorflow-cpu, tf-nightly).
The version is read from a file of the package, else from the distribution's metadata.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoprec.core.device.probe_result import FrameworkFact
from autoprec.hardware.machine import Machine


@dataclass(frozen=True)
class _Framework:
    name: str
    version_file: str
    distributions: tuple[str, ...]
    build_keys: tuple[str, ...] = ()


_FRAMEWORKS = (
    _Framework("torch", "version.py", ("torch",), ("cuda", "hip", "rocm", "xpu")),
    _Framework(
        "tensorflow",
        "",
        ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tensorflow-intel", "tf-nightly"),
    ),
    _Framework("keras", "src/version.py", ("keras", "keras-nightly")),
    _Framework("jax", "version.py", ("jax",)),
)

_ASSIGNMENT = r"^{}(?:\s*:\s*[^=\n]+)?\s*=\s*['\"]([^'\"\n]{{1,80}})['\"]"


def find_frameworks(machine: Machine) -> tuple[FrameworkFact, ...]:
    """Find the frameworks that could be imported here, with their versions."""
    return tuple(_fact(machine, each) for each in _FRAMEWORKS if machine.has_package(each.name))


def _fact(machine: Machine, framework: _Framework) -> FrameworkFact:
    text = ""
    if framework.version_file:
        text = machine.package_file(framework.name, framework.version_file) or ""
    version = _assigned(text, "__version__") or _distribution(machine, framework)
    builds = ((key, _assigned(text, key)) for key in framework.build_keys)
    build = ", ".join(f"{key} {value}" for key, value in builds if value)
    return FrameworkFact(framework.name, version or "unknown", build)


def _distribution(machine: Machine, framework: _Framework) -> str:
    versions = (machine.distribution_version(name) for name in framework.distributions)
    return next((version for version in versions if version), "")


def _assigned(text: str, name: str) -> str:
    match = re.search(_ASSIGNMENT.format(re.escape(name)), text, re.MULTILINE)
    return match.group(1) if match else ""
