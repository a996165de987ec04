"""What libraries and dying processes printed when they failed, and what each means."""

from __future__ import annotations

import signal

from autoprec.workers.failures import FailureKind

OOM = FailureKind.OUT_OF_MEMORY
FAULT = FailureKind.DEVICE_FAULT
LOST = FailureKind.LOST_DEVICE
PEER = FailureKind.LOST_PEER
UNSUPPORTED = FailureKind.UNSUPPORTED
NONFINITE = FailureKind.NONFINITE
USER = FailureKind.USER_ERROR

# (kind, "TypeName: message" as the worker forms it, who prints it and where that is written).
# "seen" was printed by the library itself on a machine of ours; the others are the format strings
# of the sources named, or reports in the project's own tracker.
RECORDED = [
    (OOM, "MemoryError", "Python (seen)"),
    (
        OOM,
        "MemoryError: Unable to allocate 7.28 TiB for an array with shape (1000000000000,) "
        "and data type float64",
        "NumPy 2 (seen)",
    ),
    (
        OOM,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 4000000000000 bytes. Error code 12 (Cannot "
        "allocate memory)",
        "PyTorch 2.13, c10/core/impl/alloc_cpu.cpp (seen)",
    ),
    (
        OOM,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough "
        "memory: you tried to allocate 12845056000 bytes.",
        "PyTorch on Windows, c10/core/impl/alloc_cpu.cpp",
    ),
    (OOM, "RuntimeError: could not create a memory object", "oneDNN, dnnl.hpp"),
    (
        OOM,
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 14.58 GiB of which 1.31 GiB is free.",
        "PyTorch, c10/cuda/CUDACachingAllocator.cpp",
    ),
    (
        OOM,
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously "
        "reported at some other API call, so the stacktrace below might be incorrect.",
        "PyTorch, c10/cuda/CUDAException.cpp",
    ),
    (OOM, "AcceleratorError: CUDA error: out of memory", "PyTorch 2.8 and later"),
    (
        OOM,
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "PyTorch, aten/src/ATen/cuda/CUDABlas.cpp",
    ),
    (OOM, "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "PyTorch, cudnn/Exceptions.h"),
    (
        OOM,
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you "
        "passed in a non-contiguous input.",
        "PyTorch; read as out of memory by accelerate/utils/memory.py and Lightning",
    ),
    (
        OOM,
        "OutOfMemoryError: HIP out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total "
        "capacity of 63.98 GiB of which 5.89 GiB is free.",
        "PyTorch for ROCm, c10/hip",
    ),
    (OOM, "RuntimeError: HIP error: out of memory", "PyTorch for ROCm"),
    (
        OOM,
        "OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 15.91 GiB.",
        "PyTorch, c10/xpu/XPUCachingAllocator.cpp",
    ),
    (
        OOM,
        "RuntimeError: Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
        "oneAPI DPC++ 2024",
    ),
    (
        OOM,
        "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_"
        "MEMORY)",
        "oneAPI unified runtime, ur_api.h",
    ),
    (
        OOM,
        "RuntimeError: MPS backend out of memory (MPS allocated: 17.81 GB, other allocations: "
        "112.00 KB, max allowed: 18.13 GB). Tried to allocate 512.00 MB on private pool.",
        "PyTorch, aten/src/ATen/mps/MPSAllocator.mm",
    ),
    (OOM, "RuntimeError: Invalid buffer size: 24.00 GB", "PyTorch, mps/MPSAllocator.mm"),
    (
        OOM,
        "ResourceExhaustedError: {{function_node __wrapped__AddV2_device_/job:localhost/replica:0/"
        "task:0/device:CPU:0}} failed to allocate memory [Op:AddV2]",
        "TensorFlow 2.21 under RLIMIT_DATA (seen)",
    ),
    (
        OOM,
        "ResourceExhaustedError: OOM when allocating tensor with shape[4096,4096,64] and type "
        "float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
        "TensorFlow, core/framework/op_kernel.cc",
    ),
    (
        OOM,
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 "
        "bytes.",
        "XLA, bfc_allocator.cc",
    ),
    (OOM, "InternalError: Dst tensor is not initialized.", "TensorFlow, gpu_util.cc"),
    (
        OOM,
        "InternalError: failed to alloc 2147483648 bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
        "XLA, cuda_executor.cc",
    ),
    (OOM, "MemoryError: std::bad_alloc", "pybind11, and libstdc++"),
    (OOM, "OSError: [Errno 12] Cannot allocate memory", "fork(2), mmap(2)"),
    (OOM, "RuntimeError: can't start new thread", "CPython, thread_pthread.h"),
    (FAULT, "RuntimeError: CUDA error: unspecified launch failure", "CUDA, cudaErrorLaunchFailure"),
    (FAULT, "AcceleratorError: CUDA error: an illegal memory access was encountered", "CUDA 700"),
    (
        PEER,
        "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read "
        "error [127.0.0.1]:19158: Connection reset by peer. This is typically caused by a remote "
        "worker hanging or bugs in the application.",
        "Gloo, a rank that exited (seen)",
    ),
    (
        PEER,
        "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
        "Connection closed by peer [127.0.0.1]:20714. This is typically caused by a remote worker "
        "crashing.",
        "Gloo, a rank that was killed (seen)",
    ),
    (
        PEER,
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out "
        "waiting 1800000ms for recv operation to complete",
        "Gloo, transport/tcp/unbound_buffer.cc",
    ),
    (
        PEER,
        "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the "
        "remote server shutdown or crash?",
        "PyTorch's TCPStore, whose rank 0 ended (seen)",
    ),
    (PEER, "DistStoreError: wait timeout after 1000ms, keys: /never", "TCPStore, rank lost (seen)"),
    (
        PEER,
        "DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:78, remote "
        "process exited or there was a network error, NCCL version 2.27.3\nncclRemoteError: A call "
        "failed possibly due to a network error or a remote process exiting prematurely.",
        "NCCL, ncclGetErrorString(ncclRemoteError), and PyTorch's NCCLUtils.hpp",
    ),
    (LOST, "RuntimeError: CUDA error: uncorrectable ECC error encountered", "CUDA 214"),
    (LOST, "RuntimeError: CUDA error: no CUDA-capable device is detected", "CUDA 100"),
    (
        FAULT,
        "InternalError: Could not synchronize CUDA stream: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal "
        "memory access was encountered",
        "XLA, cuda_driver.cc",
    ),
    (
        LOST,
        "NVMLError_GpuIsLost: GPU is lost",
        "NVML, nvmlErrorString(NVML_ERROR_GPU_IS_LOST)",
    ),
    (
        LOST,
        "AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "CUDA 46, cudaErrorDevicesUnavailable",
    ),
    (
        UNSUPPORTED,
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "CUDA 209, cudaErrorNoKernelImageForDevice",
    ),
    (UNSUPPORTED, "RuntimeError: HIP error: invalid device function", "HIP 98"),
    (
        FAULT,
        "RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        "oneAPI unified runtime, ur_api.h",
    ),
    (
        FailureKind.TIMEOUT,
        "RuntimeError: CUDA error: the launch timed out and was terminated",
        "CUDA 702",
    ),
    (USER, "RuntimeError: CUDA error: device-side assert triggered", "CUDA 710"),
    (
        FailureKind.KILLED,
        "RuntimeError: DataLoader worker (pid 2513) is killed by signal: Killed. ",
        "PyTorch, torch/csrc/DataLoader.cpp",
    ),
    (
        FailureKind.SEGFAULT,
        "RuntimeError: DataLoader worker (pid 2513) is killed by signal: Segmentation fault. ",
        "PyTorch, torch/csrc/DataLoader.cpp",
    ),
    (
        UNSUPPORTED,
        "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'",
        "PyTorch, ATen/Dispatch.h",
    ),
    (
        UNSUPPORTED,
        "NotImplementedError: \"cholesky_cpu\" not implemented for 'BFloat16'",
        "PyTorch 2.13 (seen)",
    ),
    (UNSUPPORTED, "TypeError: Got unsupported ScalarType BFloat16", "PyTorch, .numpy() (seen)"),
    (
        UNSUPPORTED,
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16",
        "PyTorch 2.13 (seen)",
    ),
    (UNSUPPORTED, "RuntimeError: expected scalar type BFloat16 but found Float", "conv (seen)"),
    (
        UNSUPPORTED,
        "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
        "PyTorch 2.13 (seen)",
    ),
    (
        UNSUPPORTED,
        "RuntimeError: mixed dtype (CPU): expect parameter to have scalar type of Float",
        "PyTorch 2.13, layer_norm (seen)",
    ),
    (
        UNSUPPORTED,
        "ValueError: RNN input dtype (torch.float32) does not match weight dtype (torch.bfloat16)."
        " Convert input: input.to(torch.bfloat16)",
        "PyTorch 2.13 (seen)",
    ),
    (UNSUPPORTED, "RuntimeError: expected scalar type Float but found Half", "PyTorch"),
    (
        UNSUPPORTED,
        "RuntimeError: Input type (CUDABFloat16Type) and weight type (torch.cuda.FloatTensor) "
        "should be the same",
        "PyTorch, aten/src/ATen/native/Convolution.cpp",
    ),
    (
        UNSUPPORTED,
        "RuntimeError: view size is not compatible with input tensor's size and stride (at least "
        "one dimension spans across two contiguous subspaces). Use .reshape(...) instead.",
        "PyTorch 2.13, .view() of a channels_last tensor (seen)",
    ),
    (
        UNSUPPORTED,
        "RuntimeError: could not create a primitive descriptor for a matmul primitive",
        "oneDNN, dnnl.hpp",
    ),
    (
        UNSUPPORTED,
        "InvalidArgumentError: cannot compute MatMul as input #1(zero-based) was expected to be a "
        "float tensor but is a bfloat16 tensor [Op:MatMul] name: ",
        "TensorFlow 2.21, eager execution",
    ),
    (
        UNSUPPORTED,
        "TypeError: Input 'y' of 'Mul' Op has type float32 that does not match type bfloat16 of "
        "argument 'x'.",
        "TensorFlow, op_def_library.py",
    ),
    (
        UNSUPPORTED,
        "InvalidArgumentError: No OpKernel was registered to support Op 'Betainc' used by node",
        "TensorFlow, core/framework/op_kernel.cc",
    ),
    (
        UNSUPPORTED,
        "BackendCompilerFailed: backend='inductor' raised:\nRuntimeError: no C++ compiler found",
        "PyTorch, torch/_dynamo/exc.py",
    ),
    (
        NONFINITE,
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
        "PyTorch's anomaly mode, torch/csrc/autograd/engine.cpp",
    ),
    (NONFINITE, "FloatingPointError: invalid value encountered in multiply", "NumPy (seen)"),
    (NONFINITE, "InvalidArgumentError: Tensor had NaN values", "TensorFlow, check_numerics_op.cc"),
    (
        NONFINITE,
        "ValueError: Expected parameter loc (Tensor of shape (1,)) of distribution Normal(loc: "
        "tensor([nan]), scale: tensor([1.])) to satisfy the constraint Real(), but found invalid "
        "values:\ntensor([nan])",
        "torch/distributions/distribution.py (seen)",
    ),
    # What the user has to mend is the user's, whatever it resembles.
    (
        None,
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x10 and 20x5)",
        "PyTorch (seen)",
    ),
    (
        None,
        "RuntimeError: \"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
        "PyTorch: targets of the wrong integer type",
    ),
    (
        None,
        "ValueError: Expected input batch_size (32) to match target batch_size (16).",
        "PyTorch",
    ),
    (None, "RuntimeError: expected target dtype to be Long or Byte, but got Int", "PyTorch (seen)"),
    (None, "RuntimeError: expected scalar type Long but found Float", "PyTorch"),
    (None, "FileNotFoundError: [Errno 2] No such file or directory: 'train.csv'", "Python"),
    (None, "ImportError: /x.so: cannot allocate memory in static TLS block", "glibc: not memory"),
    (None, "HTTPError: 429 RESOURCE_EXHAUSTED: quota exceeded for downloads", "a web service"),
    (
        None,
        "RuntimeError: DataLoader worker (pid 3) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory. Please try to raise your shared "
        "memory limit.",
        "PyTorch: /dev/shm is too small, whatever the batch",
    ),
    (
        USER,
        "RuntimeError: Expected all tensors to be on the same device, but found at least two "
        "devices, cuda:0 and cpu!",
        "PyTorch, aten/src/ATen/TensorIterator.cpp",
    ),
    (
        USER,
        "RuntimeError: indices should be either on cpu or on the same device as the indexed tensor "
        "(cpu)",
        "PyTorch, aten/src/ATen/native/TensorAdvancedIndexing.cpp",
    ),
    (
        UNSUPPORTED,
        "FailOnRecompileLimitHit: Hard failure due to fail_on_recompile_limit_hit",
        "PyTorch 2.13, torch/_dynamo/convert_frame.py (seen)",
    ),
    (
        UNSUPPORTED,
        "NotCompiled: Keras does not compile a model with turn (RandomRotation); layers that only "
        "prepare the inputs may go into the data pipeline",
        "autoprec/backends/keras/train/compiling.py; the same of torch's Dynamo",
    ),
    (
        UNSUPPORTED,
        "RuntimeError: torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
        "autocast.\nMany models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_"
        "logits\nor torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and "
        "BCEWithLogits are\nsafe to autocast.",
        "PyTorch 2.13, aten/src/ATen/autocast_mode.cpp",
    ),
]

# What a dying process printed, with the signal it died by.
PRINTED = [
    (
        OOM,
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what(): std::bad_alloc",
        signal.SIGABRT,
    ),
    (
        OOM,
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        1,
    ),
    (
        OOM,
        "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2: Resource temporarily "
        "unavailable",
        signal.SIGSEGV,
    ),
    (
        LOST,
        "HSA exception: MemoryRegion::Allocate\nHSA_STATUS_ERROR: A generic error has occurred.",
        signal.SIGABRT,
    ),
    (
        OOM,
        ":0:rocdevice.cpp:2984: HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate",
        signal.SIGABRT,
    ),
    (OOM, "hipErrorOutOfMemory", signal.SIGABRT),
    (
        OOM,
        "Error: command buffer exited with error status. Insufficient Memory (00000008:"
        "kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        signal.SIGABRT,
    ),
    (FailureKind.ILLEGAL_INSTRUCTION, "Fatal Python error: Illegal instruction", signal.SIGILL),
    (FailureKind.KILLED, "", signal.SIGKILL),
    (FailureKind.KILLED, "Detected unsupported operations when trying to compile graph", 9),
    (FailureKind.KILLED, "", signal.SIGTERM),
    (FailureKind.SEGFAULT, "Fatal Python error: Segmentation fault", signal.SIGSEGV),
    (FailureKind.SEGFAULT, "Fatal Python error: Bus error", signal.SIGBUS),
    (FailureKind.SEGFAULT, "Assertion failed: shape", signal.SIGABRT),
]
