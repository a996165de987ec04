"""Tells failures apart: one table from evidence to kind of failure.

Evidence is an exception's type and message in the worker, or the worker's exit and the last lines
it printed. Only `OUT_OF_MEMORY` means that a recipe is too big. Messages are those of the libraries
themselves; each row says whose.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """What went wrong in a worker."""

    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"
    ILLEGAL_INSTRUCTION = "illegal_instruction"
    SEGFAULT = "segfault"
    NONFINITE = "nonfinite"
    USER_ERROR = "user_error"
    TIMEOUT = "timeout"
    LOST_DEVICE = "lost_device"
    UNSUPPORTED = "unsupported"
    EXITED = "exited"
    INTERNAL = "internal"


@dataclass(frozen=True)
class Row:
    """A piece of evidence: a pattern in "TypeName: message" or in printed output, and its kind."""

    pattern: str
    kind: FailureKind
    source: str


_OOM = FailureKind.OUT_OF_MEMORY
_LOST = FailureKind.LOST_DEVICE

TABLE: tuple[Row, ...] = (
    Row(r"^MemoryError\b", _OOM, "Python, NumPy"),
    Row(r"DefaultCPUAllocator: (can't|not enough) (allocate )?memory", _OOM, "PyTorch, CPU"),
    Row(r"could not create a memory object", _OOM, "oneDNN"),
    Row(r"^(torch\.)?(cuda\.)?OutOfMemoryError\b", _OOM, "PyTorch"),
    Row(r"(CUDA|HIP|XPU) out of memory", _OOM, "PyTorch's caching allocator"),
    Row(r"(CUDA|HIP) error: out of memory", _OOM, "CUDA and HIP runtime"),
    Row(r"MPS backend out of memory", _OOM, "PyTorch, MPS"),
    Row(r"CUBLAS_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED", _OOM, "cuBLAS, hipBLAS"),
    Row(r"CUDNN_STATUS_ALLOC_FAILED", _OOM, "cuDNN"),
    Row(r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.*workspace", _OOM, "cuDNN"),
    Row(r"UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)\w*", _OOM, "oneAPI unified runtime"),
    Row(r"ResourceExhaustedError\b|RESOURCE_EXHAUSTED", _OOM, "TensorFlow, XLA"),
    Row(r"OOM when allocating tensor", _OOM, "TensorFlow"),
    Row(r"failed to allocate .* bytes|Dst tensor is not initialized", _OOM, "TensorFlow, GPU"),
    Row(r"std::bad_alloc", _OOM, "C++ runtime"),
    Row(r"Cannot allocate memory|errno 12\b|ENOMEM", _OOM, "the system"),
    Row(r"Resource temporarily unavailable.*pthread_create", _OOM, "OpenBLAS, OpenMP"),
    Row(r"CUDA error: (the launch timed out|device-side assert)", FailureKind.USER_ERROR, "CUDA"),
    Row(
        r"CUDA error: (unspecified launch failure|an illegal memory access|uncorrectable ECC"
        r"|device lost|no CUDA-capable device)|CUDA_ERROR_(DEVICE_UNAVAILABLE|NO_DEVICE|ECC"
        r"|DEINITIALIZED)|GPU is lost|HSA_STATUS_ERROR|UR_RESULT_ERROR_DEVICE_LOST",
        _LOST,
        "CUDA, NVML, ROCm, oneAPI",
    ),
    Row(r"Illegal instruction", FailureKind.ILLEGAL_INSTRUCTION, "the system"),
    Row(
        r"not implemented for '(Half|BFloat16)'|\"\w+\" not implemented for",
        FailureKind.UNSUPPORTED,
        "PyTorch: an operator without this dtype",
    ),
    Row(
        r"could not create a primitive( descriptor)?",
        FailureKind.UNSUPPORTED,
        "oneDNN: no kernel for this dtype on this CPU",
    ),
    Row(
        r"BackendCompilerFailed|InductorError|TorchRuntimeError", FailureKind.UNSUPPORTED, "Dynamo"
    ),
)

_SIGNALS = {
    "SIGKILL": FailureKind.KILLED,
    "SIGILL": FailureKind.ILLEGAL_INSTRUCTION,
    "SIGSEGV": FailureKind.SEGFAULT,
    "SIGBUS": FailureKind.SEGFAULT,
    "SIGFPE": FailureKind.SEGFAULT,
    "SIGTERM": FailureKind.KILLED,
    "SIGABRT": FailureKind.SEGFAULT,
}


def classify_exception(error: BaseException) -> FailureKind:
    """The kind of an exception that a worker caught; `USER_ERROR` where no row fits."""
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        kind = match(describe_exception(current))
        if kind is not None:
            return kind
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)
    return FailureKind.USER_ERROR


def describe_exception(error: BaseException) -> str:
    """ "TypeName: message", also where the exception cannot say what it is."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown: str() of it failed)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def match(text: str) -> FailureKind | None:
    """The kind of the first row whose pattern occurs in `text`."""
    text = text[-20_000:]
    return next((row.kind for row in TABLE if re.search(row.pattern, text)), None)


def classify_exit(returncode: int, printed: str) -> FailureKind:
    """The kind of a worker's death: by its signal and the last lines it printed."""
    name = _signal_name(returncode)
    found = match(printed)
    if name in ("SIGABRT", "SIGSEGV", "SIGTRAP") and found in (_OOM, _LOST):
        return found
    if name is not None:
        return _SIGNALS.get(name, FailureKind.EXITED)
    return found if found in (_OOM, _LOST) and returncode != 0 else FailureKind.EXITED


def describe_exit(returncode: int) -> str:
    """How a worker ended, for people: "was ended by SIGKILL", "exited with code 3"."""
    name = _signal_name(returncode)
    return f"was ended by {name}" if name else f"exited with code {returncode}"


def _signal_name(returncode: int) -> str | None:
    """The signal's name. 137 is no signal here: only a shell says SIGKILL that way."""
    if returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


class WorkerFailure(Exception):
    """A call to a worker failed; `kind` says how, `frames` holds the user's traceback."""

    def __init__(
        self, kind: FailureKind, message: str, *, frames: str = "", phase: str = ""
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.frames = frames
        self.phase = phase
