"""The only way by which probes look at a machine.

Every probe asks a `Machine` and nothing else, so that a recording replays exactly. Whatever cannot
be read is None or empty: the probe decides what that means.
Nothing here uses a network or imports a framework.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Files in /proc and /sys are small; a larger one is not what a probe is looking for.
_LARGEST_READ_BYTES = 4_000_000
_COMMAND_TIMEOUT_SECONDS = 3.0

_CUDA_CHILD = Path(__file__).parent / "probes" / "cuda_child.py"
#: Without persistence mode the driver initialises every GPU again, up to about 3 s each.
_CUDA_TIMEOUT_SECONDS = 25.0

# Linux, arch/x86/include/uapi/asm/prctl.h and arch/x86/include/asm/fpu/types.h
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


class Machine:
    """This machine, as probes may see it; what a recording answers has the same methods."""

    @property
    def system(self) -> str:
        """Return the operating system: "Linux", "Darwin", "Windows"."""
        return platform.system()

    @property
    def architecture(self) -> str:
        """Return the instruction set: "x86_64", "aarch64", "arm64", "AMD64"."""
        return platform.machine()

    @property
    def python(self) -> str:
        """Return the interpreter's version."""
        return platform.python_version()

    def variable(self, name: str) -> str | None:
        """Return an environment variable; None if it is not set."""
        return os.environ.get(name)

    def read(self, path: str) -> str | None:
        """Read the text of a file; None if it cannot be read."""
        return _read(Path(path))

    def entries(self, path: str) -> tuple[str, ...]:
        """List the names in a folder, sorted; none if it cannot be listed."""
        try:
            return tuple(sorted(os.listdir(path)))
        except OSError:
            return ()

    def command(self, *words: str) -> str | None:
        """Return what a system command printed; None if it failed or took too long."""
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_SECONDS, check=True
            )
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
            return None
        return done.stdout

    def processors(self) -> int | None:
        """Return the number of logical processors."""
        return os.cpu_count()

    def usable_processors(self) -> int | None:
        """Return how many logical processors this process may run on; None if that is unknown."""
        affinity = getattr(os, "sched_getaffinity", None)
        try:
            return len(affinity(0)) if affinity else None
        except OSError:
            return None

    def physical_memory(self) -> int | None:
        """Return the installed memory in bytes, for systems without /proc/meminfo."""
        with contextlib.suppress(AttributeError, ValueError, OSError):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with contextlib.suppress(Exception):
            return _windows_memory()
        return None

    def tiles_permitted(self) -> bool | None:
        """Ask the kernel for AMX tile data, as oneDNN does; None if its answer is unknown."""
        if self.system != "Linux" or self.architecture not in ("x86_64", "AMD64"):
            return None
        with contextlib.suppress(Exception):
            libc = ctypes.CDLL(None)
            asked = libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
            return bool(asked == 0)
        return None

    def cpuid(self) -> Mapping[str, Any]:
        """Return py-cpuinfo's answer, for systems without /proc/cpuinfo; slow (about a second)."""
        with contextlib.suppress(Exception):
            import cpuinfo

            info = cpuinfo.get_cpu_info()
            return {
                key: info[key]
                for key in ("brand_raw", "vendor_id_raw", "family", "model", "flags")
                if key in info
            }
        return {}

    def has_package(self, name: str) -> bool:
        """Return whether a Python package is installed, without importing it."""
        return self._package_folder(name) is not None

    def package_file(self, name: str, path: str) -> str | None:
        """Read the text of a file inside an installed package."""
        folder = self._package_folder(name)
        return _read(folder / path) if folder else None

    def distribution_version(self, name: str) -> str | None:
        """Return the version of an installed distribution; None if there is none."""
        import importlib.metadata

        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def nvml(self) -> Any:
        """Import pynvml and return the module; raise ImportError without it."""
        import pynvml

        return pynvml

    def cuda(self) -> Mapping[str, Any]:
        """Ask CUDA's driver library in another process for its devices, or its "error"; slow."""
        command = (sys.executable, "-I", "-S", str(_CUDA_CHILD))
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_CUDA_TIMEOUT_SECONDS, check=True
            )
            answer: Mapping[str, Any] = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return {"error": f"CUDA's driver gave no answer in {_CUDA_TIMEOUT_SECONDS:g} seconds"}
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            return {"error": f"CUDA's driver could not be queried: {error}"}
        return answer

    def _package_folder(self, name: str) -> Path | None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(next(iter(spec.submodule_search_locations)))


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_READ_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None


def _windows_memory() -> int:
    """Return the physical memory in bytes, by GlobalMemoryStatusEx (Windows API)."""

    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "available", *"abcde")),
        )

    status = Status(length=ctypes.sizeof(Status))
    windll: Any = getattr(ctypes, "windll")  # noqa: B009  absent from the stubs elsewhere
    if not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed")
    return int(status.total)
