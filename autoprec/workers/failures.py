"""Tells failures apart: one table from evidence to kind of failure.

Evidence is an exception's type and message in the worker, or the worker's exit, the last lines it
printed and the word of the `supervisor`, which ends a worker beyond its memory. Only
`OUT_OF_MEMORY` means that a recipe is too big. Messages are those of the libraries themselves; each
row says whose. The table is one for all frameworks: they share libraries (cuDNN, oneDNN, glibc),
and a worker may die before its framework is known.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
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


def _of(kind: FailureKind, *rows: tuple[str, ...]) -> Iterator[FailurePattern]:
    """Yield the patterns of a kind; a row is a pattern, its source, and advice if there is any."""
    return (FailurePattern(pattern, kind, *more) for pattern, *more in rows)


FAILURE_PATTERNS: tuple[FailurePattern, ...] = (
    # Out of memory -------------------------------------------------------------------------------
    *_of(
        _OOM,
        (r"^MemoryError\b", "Python"),
        (r"Unable to allocate [\d.]+ \wi?B for an array", "NumPy"),
        (r"DefaultCPUAllocator: (can't allocate|not enough) memory", "PyTorch, CPU"),
        (r"could not create a memory object", "oneDNN"),
        (r"^(torch\.)?(cuda\.)?OutOfMemoryError\b", "PyTorch"),
        (r"(CUDA|HIP|XPU) out of memory", "PyTorch's caching allocator"),
        (r"(CUDA|HIP) error: out of memory", "CUDA and HIP runtime"),
        (r"CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory", "CUDA and HIP driver"),
        (r"MPS backend out of memory|Invalid buffer size: [\d.]+ [GT]i?B", "PyTorch, MPS"),
        (r"kIOGPUCommandBufferCallbackErrorOutOfMemory", "Metal"),
        (r"CUBLAS_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED", "cuBLAS, hipBLAS"),
        (r"CUDNN_STATUS_ALLOC_FAILED", "cuDNN"),
        (
            r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
            "cuDNN; accelerate and Lightning read it so too",
        ),
        (r"(UR_RESULT|PI)_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)\w*", "oneAPI"),
        (r"HSA_STATUS_ERROR_OUT_OF_RESOURCES", "ROCm"),
        (r"ResourceExhaustedError\b|RESOURCE_EXHAUSTED: .*([Mm]emory|alloc)", "TensorFlow, XLA"),
        (r"OOM when allocating tensor", "TensorFlow"),
        (r"failed to alloc(ate)? .*(bytes|memory)|Dst tensor is not initialized", "TensorFlow"),
        (r"std::bad_alloc", "C++ runtime"),
        (r"Cannot allocate memory", "the system's ENOMEM"),
        (r"pthread_create failed.*Resource temporarily unavailable", "OpenBLAS"),
        (r"Thread creation failed: Resource temporarily unavailable", "libgomp"),
        (r"can't start new thread", "Python: no memory for a thread's stack"),
    ),
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
    *_of(
        _LOST,
        (
            r"(CUDA|HIP) error: (uncorrectable ECC|device lost|no (CUDA|ROCm)-capable device)"
            r"|CUDA_ERROR_(NO_DEVICE|ECC|DEINITIALIZED)|GPU is lost|HSA_STATUS_ERROR",
            "CUDA, NVML, ROCm",
        ),
        (
            r"CUDA error: (all CUDA-capable devices are|CUDA-capable device\(s\) is/are) busy"
            r"|CUDA_ERROR_DEVICE_UNAVAILABLE",
            "CUDA 46: another process holds a GPU whose compute mode lets one use it at a time",
            "Another process holds this GPU, and its compute mode allows one at a time "
            "(`nvidia-smi -q -d COMPUTE`): wait for that process, or set the mode back with "
            "`nvidia-smi -c DEFAULT`",
        ),
    ),
    # Another rank of the job is gone, or the connection to it -------------------------------------
    *_of(
        _PEER,
        (
            r"gloo/transport/\S+\] .*([Cc]onnection|[Bb]roken pipe|[Tt]im)"
            r"|Gloo connectFullMesh failed|^Dist(Network|Store)Error\b",
            "Gloo, and the store where PyTorch's ranks meet",
        ),
        (
            r"remote process exited or there was a network error|ncclRemoteError"
            r"|NCCL communicator was aborted|Watchdog caught collective operation timeout",
            "NCCL, and PyTorch's watchdog of it",
        ),
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
    *_of(
        FailureKind.NONFINITE,
        (r"^FloatingPointError\b", "Python, NumPy"),
        (r"returned nan values in its \d+th output", "PyTorch's anomaly mode"),
        (r"Tensor had (NaN|Inf)|Inf and NaN values", "TensorFlow"),
        (r"but found invalid values:\s+tensor\(.*nan", "torch.distributions"),
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
    *_of(
        _UNSUPPORTED,
        (
            r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast",
            "PyTorch's autocast for CUDA and XPU, not the CPU's",
            "Use binary_cross_entropy_with_logits, or compute the loss in float32: `with "
            "torch.autocast(device_type, enabled=False)` in training_step, or a loss_fn(outputs, "
            "targets) instead of it",
        ),
        (
            r"CUDA error: no kernel image is available|CUDA_ERROR_NO_BINARY_FOR_GPU"
            r"|(HIP|CUDA) error: invalid device function|hipErrorNoBinaryForGpu",
            "CUDA 209, HIP 98: a build without kernels for this GPU",
            "The installed framework was built without kernels for this GPU: install a build that "
            "names its compute capability or architecture, or tune for another `device`",
        ),
        (rf"not implemented for '{_LOW_DTYPE}'", "PyTorch: no kernel for this dtype"),
        (rf"unsupported ScalarType {_LOW_DTYPE}", "PyTorch to NumPy"),
        (
            rf"expected (scalar type|dtype) \w+ but (found|got) \w*{_LOW_DTYPE}"
            rf"|expected (scalar type|dtype) {_LOW_DTYPE} but"
            r"|to have the same dtype, but got|must have the same dtype, but got"
            r"|mixed dtype \(CPU\)|RNN input dtype \(.*\) does not match weight dtype"
            r"|Input type \(.*\) and (weight|bias) type \(.*\) should be the same",
            "PyTorch: code that mixes dtypes",
        ),
        (
            r"No OpKernel was registered to support Op|Could not find device for node"
            r"|Detected unsupported operations when trying to compile graph",
            "TensorFlow: no kernel for this dtype",
        ),
        (
            r"was expected to be an? \w+ tensor but is an? \w+ tensor"
            r"|has type \w+ that does not match type \w+ of argument"
            r"|Tensor conversion requested dtype \w+ for Tensor with dtype",
            "TensorFlow: code that mixes dtypes",
        ),
        (
            r"view size is not compatible with input tensor's size and stride",
            "PyTorch: .view() of a channels_last tensor",
        ),
        (r"could not create a primitive( descriptor)?", "oneDNN: no such kernel"),
        (
            r"FailOnRecompileLimitHit",
            "Dynamo gave up compiling: the rest would run eagerly",
            "torch.compile recompiled too often and would have run the rest eagerly; shapes that "
            "vary from batch to batch do this: pad them, or mark them with "
            "torch._dynamo.mark_dynamic",
        ),
        (r"^NotCompiled\b", "ours: the framework left a compiled step to Python"),
        (r"BackendCompilerFailed|InductorError|TorchRuntimeError", "Dynamo"),
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
    """Classify an exception that a worker caught; `USER_ERROR` if no pattern matches."""
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
    """Append the known remedy to a message, if there is one."""
    found = _matching_pattern(text)
    if found is None or not found.advice:
        return text
    first, _, _ = text.partition("\n")
    return f"{first.rstrip('.')}. {found.advice}"


def _matching_pattern(text: str) -> FailurePattern | None:
    text = text[-20_000:]
    return next((each for each in FAILURE_PATTERNS if re.search(each.pattern, text)), None)


def explain_exit(
    returncode: int | None, printed: str, phase: str, over_memory: str = ""
) -> tuple[FailureKind, str]:
    """Say what it means that a worker ended in a phase: the kind, and a sentence.

    `over_memory` is what the supervisor says where it ended the worker for its memory. The worker's
    end of the channel is closed; where it runs all the same, it has no return code (None).
    """
    if over_memory:
        said = f"ended by autoprec before the kernel would: {over_memory}"
        return FailureKind.OUT_OF_MEMORY, said
    if returncode is None:
        return FailureKind.EXITED, (
            f"the task closed the worker's channel in the phase {phase!r}; does it close "
            "descriptors it did not open?"
        )
    kind = classify_exit(returncode, printed)
    said = f"the worker {describe_exit(returncode)} in the phase {phase!r}"
    if kind is FailureKind.EXITED and match_failure(printed) is None and returncode >= 0:
        said += "; does the task call os._exit?"
    return kind, said


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

    `raised_in` are the paths of the modules whose code was running, innermost first, if that is
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
