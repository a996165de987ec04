"""Tells failures apart: one table from evidence to kind of failure.

Evidence is an exception's type and message in the worker, or the worker's exit and the last lines
it printed. Only `OUT_OF_MEMORY` means that a recipe is too big. Messages are those of the libraries
themselves; each row says whose. The table is one for all frameworks: they share libraries (cuDNN,
oneDNN, glibc), and a worker may die before its framework is known.
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
    DATA_ERROR = "data_error"
    TIMEOUT = "timeout"
    DEVICE_FAULT = "device_fault"
    LOST_DEVICE = "lost_device"
    LOST_PEER = "lost_peer"
    UNSUPPORTED = "unsupported"
    EXITED = "exited"
    INTERNAL = "internal"


@dataclass(frozen=True)
class FailurePattern:
    """A piece of evidence: a pattern in "TypeName: message" or in printed output, and its kind.

    `advice` says how to fix it, where the message does not and there is one answer.
    """

    pattern: str
    kind: FailureKind
    source: str
    advice: str = ""


# Short names, so that most patterns fit a line.
_OOM = FailureKind.OUT_OF_MEMORY
_FAULT = FailureKind.DEVICE_FAULT
_LOST = FailureKind.LOST_DEVICE
_PEER = FailureKind.LOST_PEER

_UNSUPPORTED = FailureKind.UNSUPPORTED
_LOW_DTYPE = r"(Half|BFloat16|Float8\w*)"

FAILURE_PATTERNS: tuple[FailurePattern, ...] = (
    # Out of memory -------------------------------------------------------------------------------
    FailurePattern(r"^MemoryError\b", _OOM, "Python"),
    FailurePattern(r"Unable to allocate [\d.]+ \wi?B for an array", _OOM, "NumPy"),
    FailurePattern(
        r"DefaultCPUAllocator: (can't allocate|not enough) memory", _OOM, "PyTorch, CPU"
    ),
    FailurePattern(r"could not create a memory object", _OOM, "oneDNN"),
    FailurePattern(r"^(torch\.)?(cuda\.)?OutOfMemoryError\b", _OOM, "PyTorch"),
    FailurePattern(r"(CUDA|HIP|XPU) out of memory", _OOM, "PyTorch's caching allocator"),
    FailurePattern(r"(CUDA|HIP) error: out of memory", _OOM, "CUDA and HIP runtime"),
    FailurePattern(r"CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory", _OOM, "CUDA and HIP driver"),
    FailurePattern(
        r"MPS backend out of memory|Invalid buffer size: [\d.]+ [GT]i?B", _OOM, "PyTorch, MPS"
    ),
    FailurePattern(r"kIOGPUCommandBufferCallbackErrorOutOfMemory", _OOM, "Metal"),
    FailurePattern(
        r"CUBLAS_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED", _OOM, "cuBLAS, hipBLAS"
    ),
    FailurePattern(r"CUDNN_STATUS_ALLOC_FAILED", _OOM, "cuDNN"),
    FailurePattern(
        r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        _OOM,
        "cuDNN; accelerate and Lightning read it so too",
    ),
    FailurePattern(r"(UR_RESULT|PI)_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)\w*", _OOM, "oneAPI"),
    FailurePattern(r"HSA_STATUS_ERROR_OUT_OF_RESOURCES", _OOM, "ROCm"),
    FailurePattern(
        r"ResourceExhaustedError\b|RESOURCE_EXHAUSTED: .*([Mm]emory|alloc)", _OOM, "TensorFlow, XLA"
    ),
    FailurePattern(r"OOM when allocating tensor", _OOM, "TensorFlow"),
    FailurePattern(
        r"failed to alloc(ate)? .*(bytes|memory)|Dst tensor is not initialized", _OOM, "TensorFlow"
    ),
    FailurePattern(r"std::bad_alloc", _OOM, "C++ runtime"),
    FailurePattern(r"Cannot allocate memory", _OOM, "the system's ENOMEM"),
    FailurePattern(r"pthread_create failed.*Resource temporarily unavailable", _OOM, "OpenBLAS"),
    FailurePattern(r"Thread creation failed: Resource temporarily unavailable", _OOM, "libgomp"),
    FailurePattern(r"can't start new thread", _OOM, "Python: no memory for a thread's stack"),
    # A kernel faulted: this process's context is lost, another process can use the device ---------
    FailurePattern(
        r"(CUDA|HIP) error: (unspecified launch failure|an illegal (memory access|instruction)"
        r"|misaligned address|invalid (program counter|address space)|hardware stack error)"
        r"|CUDA_ERROR_(LAUNCH_FAILED|ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS)"
        r"|HSA_STATUS_ERROR_(EXCEPTION|MEMORY_APERTURE_VIOLATION|ILLEGAL_INSTRUCTION"
        r"|MEMORY_FAULT)|Memory access fault by GPU|UR_RESULT_ERROR_DEVICE_LOST",
        _FAULT,
        "CUDA errors 700, 715 to 719; ROCr's queue errors; Level Zero's word for a device that was "
        "reset after a hang or a fault",
    ),
    # The device, or a process, is lost -----------------------------------------------------------
    FailurePattern(
        r"(CUDA|HIP) error: (uncorrectable ECC|device lost|no (CUDA|ROCm)-capable device)"
        r"|CUDA_ERROR_(NO_DEVICE|ECC|DEINITIALIZED)|GPU is lost|HSA_STATUS_ERROR",
        _LOST,
        "CUDA, NVML, ROCm",
    ),
    FailurePattern(
        r"CUDA error: (all CUDA-capable devices are|CUDA-capable device\(s\) is/are) busy"
        r"|CUDA_ERROR_DEVICE_UNAVAILABLE",
        _LOST,
        "CUDA 46: another process holds a GPU whose compute mode lets one use it at a time",
        "Another process holds this GPU, and its compute mode allows one at a time (`nvidia-smi -q "
        "-d COMPUTE`): wait for that process, or set the mode back with `nvidia-smi -c DEFAULT`",
    ),
    # Another rank of the job is gone, or the connection to it -------------------------------------
    FailurePattern(
        r"gloo/transport/\S+\] .*([Cc]onnection|[Bb]roken pipe|[Tt]im)|Gloo connectFullMesh failed"
        r"|^Dist(Network|Store)Error\b",
        _PEER,
        "Gloo, and the store where PyTorch's ranks meet",
    ),
    FailurePattern(
        r"remote process exited or there was a network error|ncclRemoteError"
        r"|NCCL communicator was aborted|Watchdog caught collective operation timeout",
        _PEER,
        "NCCL, and PyTorch's watchdog of it",
    ),
    FailurePattern(
        r"DataLoader worker .*killed by signal: Killed",
        FailureKind.KILLED,
        "PyTorch: the kernel killed a loader's process",
    ),
    FailurePattern(
        r"DataLoader worker .*killed by signal: (Segmentation fault|Aborted)",
        FailureKind.SEGFAULT,
        "PyTorch: a loader's process crashed",
    ),
    FailurePattern(r"Illegal instruction", FailureKind.ILLEGAL_INSTRUCTION, "the system"),
    FailurePattern(r"CUDA error: the launch timed out", FailureKind.TIMEOUT, "CUDA's watchdog"),
    FailurePattern(
        r"CUDA error: device-side assert", FailureKind.USER_ERROR, "CUDA: an index out of range"
    ),
    # Numbers -------------------------------------------------------------------------------------
    FailurePattern(r"^FloatingPointError\b", FailureKind.NONFINITE, "Python, NumPy"),
    FailurePattern(
        r"returned nan values in its \d+th output", FailureKind.NONFINITE, "PyTorch's anomaly mode"
    ),
    FailurePattern(r"Tensor had (NaN|Inf)|Inf and NaN values", FailureKind.NONFINITE, "TensorFlow"),
    FailurePattern(
        r"but found invalid values:\s+tensor\(.*nan", FailureKind.NONFINITE, "torch.distributions"
    ),
    # The task's own code, where the fix is known
    FailurePattern(
        r"xpected (all )?tensors to be on the same device|indices should be either on \w+ or on",
        FailureKind.USER_ERROR,
        "PyTorch: a tensor made on the CPU meets one of the accelerator",
        "Make tensors where the others are, as in torch.arange(n, device=inputs.device); constants "
        "of a model are buffers (register_buffer), and a batch of a class of your own needs a "
        "method to(device)",
    ),
    # No kernel for this dtype, or code that a recipe breaks
    FailurePattern(
        r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast",
        _UNSUPPORTED,
        "PyTorch's autocast for CUDA and XPU, not the CPU's",
        "Use binary_cross_entropy_with_logits, or compute the loss in float32: `with "
        "torch.autocast(device_type, enabled=False)` in training_step, or a loss_fn(outputs, "
        "targets) instead of it",
    ),
    FailurePattern(
        r"CUDA error: no kernel image is available|CUDA_ERROR_NO_BINARY_FOR_GPU"
        r"|(HIP|CUDA) error: invalid device function|hipErrorNoBinaryForGpu",
        _UNSUPPORTED,
        "CUDA 209, HIP 98: a build without kernels for this GPU",
        "The installed framework was built without kernels for this GPU: install a build that "
        "names its compute capability or architecture, or tune for another `device`",
    ),
    FailurePattern(
        rf"not implemented for '{_LOW_DTYPE}'", _UNSUPPORTED, "PyTorch: no kernel for this dtype"
    ),
    FailurePattern(rf"unsupported ScalarType {_LOW_DTYPE}", _UNSUPPORTED, "PyTorch to NumPy"),
    FailurePattern(
        rf"expected (scalar type|dtype) \w+ but (found|got) \w*{_LOW_DTYPE}"
        rf"|expected (scalar type|dtype) {_LOW_DTYPE} but"
        r"|to have the same dtype, but got|must have the same dtype, but got"
        r"|mixed dtype \(CPU\)|RNN input dtype \(.*\) does not match weight dtype"
        r"|Input type \(.*\) and (weight|bias) type \(.*\) should be the same",
        _UNSUPPORTED,
        "PyTorch: code that mixes dtypes",
    ),
    FailurePattern(
        r"No OpKernel was registered to support Op|Could not find device for node"
        r"|Detected unsupported operations when trying to compile graph",
        _UNSUPPORTED,
        "TensorFlow: no kernel for this dtype",
    ),
    FailurePattern(
        r"was expected to be an? \w+ tensor but is an? \w+ tensor"
        r"|has type \w+ that does not match type \w+ of argument"
        r"|Tensor conversion requested dtype \w+ for Tensor with dtype",
        _UNSUPPORTED,
        "TensorFlow: code that mixes dtypes",
    ),
    FailurePattern(
        r"view size is not compatible with input tensor's size and stride",
        _UNSUPPORTED,
        "PyTorch: .view() of a channels_last tensor",
    ),
    FailurePattern(
        r"could not create a primitive( descriptor)?", _UNSUPPORTED, "oneDNN: no such kernel"
    ),
    FailurePattern(
        r"FailOnRecompileLimitHit",
        _UNSUPPORTED,
        "Dynamo gave up compiling: the rest would run eagerly",
        "torch.compile recompiled too often and would have run the rest eagerly; shapes that vary "
        "from batch to batch do this: pad them, or mark them with torch._dynamo.mark_dynamic",
    ),
    FailurePattern(
        r"^NotCompiled\b", _UNSUPPORTED, "ours: the framework left a compiled step to Python"
    ),
    FailurePattern(
        r"BackendCompilerFailed|InductorError|TorchRuntimeError", _UNSUPPORTED, "Dynamo"
    ),
)

_KIND_OF_SIGNAL = {
    "SIGKILL": FailureKind.KILLED,
    "SIGILL": FailureKind.ILLEGAL_INSTRUCTION,
    "SIGSEGV": FailureKind.SEGFAULT,
    "SIGBUS": FailureKind.SEGFAULT,
    "SIGFPE": FailureKind.SEGFAULT,
    "SIGTERM": FailureKind.KILLED,
    "SIGABRT": FailureKind.SEGFAULT,
}


def classify_exception(error: BaseException) -> FailureKind:
    """Classify an exception that a worker caught; `USER_ERROR` where no pattern matches."""
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, MemoryError):  # NumPy's own is a subclass of another name
            return _OOM
        kind = match_failure(describe_exception(current))
        if kind is not None:
            return kind
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)
    return FailureKind.USER_ERROR


#: What may happen to the user's data for reasons outside their code: not a `DATA_ERROR`.
_NOT_THE_DATAS = (_OOM, _FAULT, _LOST, _PEER, FailureKind.KILLED, FailureKind.SEGFAULT)


def classify_data_error(error: BaseException) -> FailureKind:
    """Classify what the user's data raised: `DATA_ERROR` unless the machine is the cause."""
    kind = classify_exception(error)
    return kind if kind in _NOT_THE_DATAS else FailureKind.DATA_ERROR


def describe_exception(error: BaseException) -> str:
    """Return "TypeName: message", even for an exception whose `str()` raises."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown: str() of it failed)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def match_failure(text: str) -> FailureKind | None:
    """Return the kind of the first pattern that occurs in `text`."""
    found = _matching_pattern(text)
    return None if found is None else found.kind


def add_advice(text: str) -> str:
    """Append the known remedy to a message, where there is one."""
    found = _matching_pattern(text)
    if found is None or not found.advice:
        return text
    first, _, _ = text.partition("\n")
    return f"{first.rstrip('.')}. {found.advice}"


def _matching_pattern(text: str) -> FailurePattern | None:
    text = text[-20_000:]
    return next((each for each in FAILURE_PATTERNS if re.search(each.pattern, text)), None)


def classify_exit(returncode: int, printed: str) -> FailureKind:
    """Classify a worker's death by its signal and the last lines it printed."""
    name = _signal_name(returncode)
    found = match_failure(printed)
    if name in ("SIGABRT", "SIGSEGV", "SIGTRAP") and found in (_OOM, _FAULT, _LOST, _PEER):
        return found
    if name is not None:
        return _KIND_OF_SIGNAL.get(name, FailureKind.EXITED)
    if found in (_OOM, _FAULT, _LOST, _PEER) and returncode != 0:
        return found
    return FailureKind.EXITED


def describe_exit(returncode: int) -> str:
    """Say in words how a worker ended: "was ended by SIGKILL", "exited with code 3"."""
    name = _signal_name(returncode)
    return f"was ended by {name}" if name else f"exited with code {returncode}"


def _signal_name(returncode: int) -> str | None:
    """Return the signal's name; None for an exit code.

    So for 137, too, by which only a shell means SIGKILL.
    """
    if returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


class WorkerFailure(Exception):
    """A call to a worker failed; `kind` says how, `frames` holds the user's traceback.

    `raised_in` are the paths of the modules whose code was running, innermost first, where that is
    known.
    """

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        frames: str = "",
        phase: str = "",
        raised_in: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.frames = frames
        self.phase = phase
        self.raised_in = raised_in
