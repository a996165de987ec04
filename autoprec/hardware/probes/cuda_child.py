"""A program that asks CUDA's driver library for its devices and prints them as JSON.

Initialising CUDA takes memory on the GPU, changes the process for good and may never return, so
`Machine.cuda` runs this file in a child with a time limit. Nothing outside the standard library is
imported. Source: CUDA Driver API reference (cuda.h: CUdevice_attribute, CUuuid).
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

# CUdevice_attribute
_INTEGRATED, _MAJOR, _MINOR = 18, 75, 76
_NAME_BYTES, _UUID_BYTES, _BUS_BYTES = 256, 16, 32


class CudaError(Exception):
    """An error code that a call of the driver's library returned."""


class Cuda:
    """The driver library's calls that describe devices."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a CUresult; raise `CudaError` if that is not success."""
        function = getattr(self._library, name, None)
        if function is None:
            raise CudaError(f"{name} is not in this library")
        code = function(*arguments)
        if code:
            raise CudaError(f"{name}: {self._text(code)}")

    def _text(self, code: int) -> str:
        text = ctypes.c_char_p()
        try:
            self._library.cuGetErrorString(code, ctypes.byref(text))
        except AttributeError:
            text.value = None
        return f"{(text.value or b'').decode(errors='replace')} (CUDA error {code})".strip()

    def number(self, name: str, *arguments: Any) -> int:
        """Return the integer that a call writes into its first argument."""
        found = ctypes.c_int()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value

    def text(self, name: str, length: int, device: int) -> str:
        """Return the text that a call writes into its first argument."""
        found = ctypes.create_string_buffer(length)
        self.call(name, found, length, device)
        return found.value.decode(errors="replace")

    def size(self, name: str, device: int) -> int:
        """Return the size that a call writes into its first argument."""
        found = ctypes.c_size_t()
        self.call(name, ctypes.byref(found), device)
        return found.value

    def uuid(self, device: int) -> str:
        """Return the UUID of the device or MIG instance, in hexadecimal with hyphens."""
        found = (ctypes.c_ubyte * _UUID_BYTES)()
        self.call("cuDeviceGetUuid_v2", found, device)
        text = bytes(found).hex()
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def ask(library: Any) -> dict[str, Any]:
    """Describe every device that CUDA shows this process, in its order."""
    cuda = Cuda(library)
    cuda.call("cuInit", 0)
    version = cuda.number("cuDriverGetVersion")
    devices = [_device(cuda, i) for i in range(cuda.number("cuDeviceGetCount"))]
    return {"version": f"{version // 1000}.{version % 1000 // 10}", "devices": devices}


def _device(cuda: Cuda, ordinal: int) -> dict[str, Any]:
    device = cuda.number("cuDeviceGet", ordinal)
    found: dict[str, Any] = {"name": cuda.text("cuDeviceGetName", _NAME_BYTES, device)}
    major, minor, integrated = (
        cuda.number("cuDeviceGetAttribute", each, device) for each in (_MAJOR, _MINOR, _INTEGRATED)
    )
    found |= {"compute_capability": f"{major}.{minor}", "integrated": bool(integrated)}
    further: dict[str, Callable[[], str | int]] = {
        "uuid": lambda: cuda.uuid(device),
        "pci_bus": lambda: cuda.text("cuDeviceGetPCIBusId", _BUS_BYTES, device),
        "memory_bytes": lambda: cuda.size("cuDeviceTotalMem_v2", device),
    }
    for key, read in further.items():
        try:
            found[key] = read()
        except CudaError:  # an older driver, or a device without one
            continue
    return found


def main() -> int:
    """Print the devices, or why there are none."""
    try:
        name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
        found = ask(ctypes.CDLL(name))
    except (OSError, CudaError) as error:
        found = {"error": str(error)}
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
