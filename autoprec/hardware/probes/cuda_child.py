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
_NAME_BYTES, _UUID_BYTES = 256, 16


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

    def read(self, name: str, kind: Any, *arguments: Any) -> Any:
        """Return what a call writes into its first argument, which is of this C type."""
        written = kind()
        self.call(name, ctypes.byref(written), *arguments)
        return written

    def text(self, name: str, length: int, device: int) -> str:
        """Return the text of at most `length` bytes that a call writes."""
        text: bytes = self.read(name, ctypes.c_char * length, length, device).value
        return text.decode(errors="replace")

    def uuid(self, device: int) -> str:
        """Return the UUID of the device or MIG instance, in hexadecimal with hyphens."""
        text = bytes(self.read("cuDeviceGetUuid_v2", ctypes.c_ubyte * _UUID_BYTES, device)).hex()
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def ask(library: Any) -> dict[str, Any]:
    """Describe every device that CUDA shows this process, in its order."""
    cuda = Cuda(library)
    cuda.call("cuInit", 0)
    version = cuda.read("cuDriverGetVersion", ctypes.c_int).value
    count = cuda.read("cuDeviceGetCount", ctypes.c_int).value
    devices = [_device(cuda, ordinal) for ordinal in range(count)]
    return {"version": f"{version // 1000}.{version % 1000 // 10}", "devices": devices}


def _device(cuda: Cuda, ordinal: int) -> dict[str, Any]:
    device = cuda.read("cuDeviceGet", ctypes.c_int, ordinal).value
    facts: dict[str, Any] = {"name": cuda.text("cuDeviceGetName", _NAME_BYTES, device)}
    major, minor, integrated = (
        cuda.read("cuDeviceGetAttribute", ctypes.c_int, each, device).value
        for each in (_MAJOR, _MINOR, _INTEGRATED)
    )
    facts |= {"compute_capability": f"{major}.{minor}", "integrated": bool(integrated)}
    further: dict[str, Callable[[], str | int]] = {
        "uuid": lambda: cuda.uuid(device),
        "memory_bytes": lambda: cuda.read("cuDeviceTotalMem_v2", ctypes.c_size_t, device).value,
    }
    for key, read in further.items():
        try:
            facts[key] = read()
        except CudaError:  # an older driver, or a device without one
            continue
    return facts


def main() -> int:
    """Print the devices, or why there are none."""
    try:
        name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
        answer = ask(ctypes.CDLL(name))
    except (OSError, CudaError) as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
