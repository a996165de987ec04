"""The border below torch's Python layer: the functions of torch._C that a build for a device has.

torch.cuda, torch.xpu and torch.mps stay what they are, with their checks of arguments; only what
they call is answered here.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from types import SimpleNamespace
from typing import Any

import torch

from pretended import faults, settings, tensors
from pretended.memory import BOOKS

#: The compiled guard, which sitecustomize has loaded before torch looked for hooks.
_library = ctypes.CDLL(os.environ["REHEARSAL_GUARD"])


def current() -> int:
    """The index of the current device."""
    return int(_library.rehearsal_current())


def exchange(index: int) -> int:
    """Make a device the current one; return which was."""
    if index >= 0:
        check(index)
    return int(_library.rehearsal_exchange(index))


def check(index: int) -> None:
    """Raise for an index that no device has."""
    if not 0 <= index < len(BOOKS):
        raise RuntimeError("CUDA error: invalid device ordinal")


def synchronize(*_: Any) -> None:
    """Wait for every copy; a lost context says so here too."""
    tensors.wait()
    if faults._poison:
        raise RuntimeError(faults._poison[0])


class Event:
    """A timing event; the times are the CPU's and mean nothing."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._timing, self._at = enable_timing, None

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        if not (self._timing and other._timing):
            raise RuntimeError("both events must be created with argument 'enable_timing=True'")
        if self._at is None or other._at is None:
            raise RuntimeError("both events must be recorded before calculating elapsed time")
        return (other._at - self._at) * 1e3

    def synchronize(self) -> None:
        synchronize()

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...


class Stream:
    """The one stream there is."""

    stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device(settings.TYPE, current())

    def synchronize(self) -> None:
        synchronize()

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None: ...


def _set(names: dict[str, Any]) -> None:
    for name, value in names.items():
        setattr(torch._C, name, value)


def install() -> None:
    """Answer for the device; once, after `import torch`."""
    _set(
        {
            "_accelerator_getAccelerator": lambda: torch.device(settings.TYPE),
            "_accelerator_synchronizeDevice": synchronize,
            "_accelerator_getDeviceIndex": current,
            "_accelerator_setDeviceIndex": lambda index: exchange(index) and None,
            "_accelerator_exchangeDevice": exchange,
            "_accelerator_maybeExchangeDevice": exchange,
            "_accelerator_isAllocatorInitialized": lambda: True,
            "_accelerator_emptyCache": _empty_caches,
        }
    )
    {"cuda": _install_cuda, "xpu": _install_xpu, "mps": _install_mps}[settings.TYPE]()
    if torch.distributed.is_available():  # DDP's log asks for a timer of the device's own
        torch.distributed.Logger.set_runtime_stats_and_log = lambda self: None
    torch.ctc_loss = tensors.ctc_loss
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(...) copies to the device visibly
    tensors.Mode().__enter__()


def _empty_caches(*_: Any) -> None:
    for books in BOOKS:
        books.empty_cache()


def _fraction(share: float, index: int) -> None:
    check(index)
    BOOKS[index].fraction = share


def _names(prefix: str) -> dict[str, Any]:
    """What torch._C has for CUDA and for XPU under the same names."""
    answers = {
        "getDeviceCount": lambda: len(BOOKS),
        "init": lambda: None,
        "getDevice": current,
        "setDevice": lambda index: exchange(index) and None,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "isInBadFork": lambda: False,
        "setMemoryFraction": _fraction,
        "getMemoryFraction": lambda index: BOOKS[index].fraction,
        "synchronize": synchronize,
        "emptyCache": _empty_caches,
        "resetPeakMemoryStats": lambda index: BOOKS[index].reset_peak(),
        "resetAccumulatedMemoryStats": lambda index: None,
        "memoryStats": lambda index: BOOKS[index].statistics(),
        "getCurrentRawStream": lambda index: 0,
        "setStream": lambda **stream: None,
        "getCurrentStream": lambda index: (0, 0, 1),
        "getDefaultStream": lambda index: (0, 0, 1),
    }
    return {f"_{prefix}_{name}": answer for name, answer in answers.items()}


def _generators() -> tuple[torch.Generator, ...]:
    return tuple(torch.Generator() for _ in BOOKS)


def _install_cuda() -> None:
    more = {
        "_cuda_ipc_collect": lambda: None,
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_hasPrimaryContext": lambda index: True,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getArchFlags": lambda: "sm_70 sm_80 sm_90 sm_100",
        "_cuda_lock_mutex": lambda: None,
        "_cuda_unlock_mutex": lambda: None,
    }
    _set({**_names("cuda"), **more})
    cuda = torch.cuda
    if settings.KIND == "rocm":
        torch.version.hip = "7.0.51831"
    else:
        torch.version.cuda = "13.0"
    cuda._exchange_device = cuda._maybe_exchange_device = exchange
    runtime = SimpleNamespace(
        cudaMemGetInfo=lambda index: (BOOKS[index].free(), BOOKS[index].total),
        cudaGetErrorString=str,
        cudaError=SimpleNamespace(success=0),
    )
    cuda._cudart = runtime
    cuda.cudart = lambda: (cuda._lazy_init(), runtime)[1]
    cuda.device_count = lambda: len(BOOKS)
    cuda.get_device_properties = _properties
    cuda._get_device_properties = _properties
    cuda._queued_calls.clear()
    cuda.Event = cuda.streams.Event = Event
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.current_stream = cuda.default_stream = lambda device=None: Stream()
    cudnn = torch.backends.cudnn
    cudnn.is_acceptable = lambda tensor: (
        tensor.is_cuda and cudnn.enabled and tensor.dtype in cudnn.CUDNN_TENSOR_DTYPES
    )
    cuda.default_generators = _generators()
    cuda.get_rng_state = lambda device="cuda": cuda.default_generators[_index(device)].get_state()
    cuda.set_rng_state = lambda state, device="cuda": cuda.default_generators[
        _index(device)
    ].set_state(state)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current() if index is None else index


def _properties(device: Any = None) -> SimpleNamespace:
    index = current() if device is None else _index(device)
    check(index)
    gpu = settings.GPUS[index]
    major, minor = (int(part) for part in gpu["capability"].split("."))
    return SimpleNamespace(
        name=gpu["name"],
        major=major,
        minor=minor,
        total_memory=gpu["bytes"],
        multi_processor_count=gpu["processors"],
        uuid=gpu["uuid"].removeprefix("GPU-"),
        warp_size=32,
        gcnArchName=gpu.get("architecture", ""),
        is_integrated=False,
        is_multi_gpu_board=False,
        has_fp64=settings.HAS_FLOAT64,
        L2_cache_size=50 << 20,
        pci_bus_id=index + 1,
        device_id=int(gpu["pci"], 16),
    )


def _xpu_properties(device: Any = None) -> SimpleNamespace:
    """The same with a UUID as Intel's driver makes it of the PCI address."""
    found = _properties(device)
    index = current() if device is None else _index(device)
    slot = settings.MACHINE.index(settings.GPUS[index]) + 3
    uuid = struct.pack("<HHHHBBB4xB", 0x8086, found.device_id, 0, 0, slot, 0, 0, 0)
    found.uuid = SimpleNamespace(bytes=list(uuid))
    return found


def _install_xpu() -> None:
    xpu, rounded = torch.xpu, {"allowed": False}
    type(torch.backends.mkldnn).allow_tf32 = torch.backends.ContextProp(
        lambda: rounded["allowed"], lambda allowed: rounded.update(allowed=allowed)
    )
    info = {"_xpu_getMemoryInfo": lambda index: (BOOKS[index].free(), BOOKS[index].total)}
    more = {"_has_xpu": True, "_xpu_getArchFlags": lambda: "dg2"}
    _set({**_names("xpu"), **info, **more})
    xpu._is_compiled = lambda: True
    xpu._exchange_device = xpu._maybe_exchange_device = exchange
    xpu.device_count = lambda: len(BOOKS)
    xpu.get_device_properties = _xpu_properties
    xpu._lazy_init = lambda: None
    xpu._initialized = True
    xpu.Event = xpu.streams.Event = Event
    xpu.Stream = xpu.streams.Stream = Stream
    xpu.current_stream = lambda device=None: Stream()
    xpu.default_generators = _generators()


def _install_mps() -> None:
    books = BOOKS[0]
    events: dict[int, Event] = {}
    generator = torch.Generator()

    def acquire(timing: bool) -> int:
        events[len(events) + 1] = Event(timing)
        return len(events)

    _set(
        {
            "_has_mps": True,
            "_mps_is_available": lambda: True,
            "_mps_is_in_bad_fork": lambda: False,
            "_mps_is_on_macos_or_newer": lambda major, minor=0: True,
            "_mps_get_default_generator": lambda: generator,
            "_mps_deviceSynchronize": synchronize,
            "_mps_emptyCache": _empty_caches,
            "_mps_setMemoryFraction": lambda share: _fraction(min(share, 1.0), 0),
            "_mps_currentAllocatedMemory": lambda: books.allocated,
            "_mps_driverAllocatedMemory": lambda: books.reserved,
            "_mps_recommendedMaxMemory": lambda: books.total,
            "_mps_acquireEvent": acquire,
            "_mps_releaseEvent": lambda number: None,
            "_mps_recordEvent": lambda number: events[number].record(),
            "_mps_waitForEvent": lambda number: None,
            "_mps_queryEvent": lambda number: True,
            "_mps_synchronizeEvent": lambda number: synchronize(),
            "_mps_elapsedTimeOfEvents": lambda a, b: events[a].elapsed_time(events[b]),
        }
    )
    torch.backends.mps.is_available = lambda: True
    torch.backends.mps.is_built = lambda: True
