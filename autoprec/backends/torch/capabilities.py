"""What autoprec has to know of PyTorch without importing it."""

from __future__ import annotations

from autoprec.backends.protocol import Capabilities
from autoprec.core.device.observation import DeviceKind
from autoprec.core.recipe import ATTENTION, COMPILE_MODE, COMPILE_SCOPE, FLOAT8, KEEP_MEMORY

_SEARCHED_KNOBS = (
    "fused_optimizer",
    KEEP_MEMORY,
    "threads",
    "implicit_bfloat16",
    "cudnn_benchmark",
    FLOAT8,
    ATTENTION,
    COMPILE_MODE,
    COMPILE_SCOPE,
)

CAPABILITIES = Capabilities(
    title="PyTorch",
    model="a torch.nn.Module",
    backend_class="TorchBackend",
    model_modules=("torch",),
    required_modules=("torch",),
    extra="torch",
    accelerator_builds="https://pytorch.org/get-started/locally",
    knobs=_SEARCHED_KNOBS,
    searched_knobs=_SEARCHED_KNOBS,
    rank_engines=("ddp", "fsdp2"),
    loss_in_task=True,
    # Inductor can gain as much as precision does there. On a CPU it may take minutes.
    compiles_on=(DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.XPU),
    # What other sessions hold decides how much of the heap glibc trims after each step, which
    # changes a step's time by a third.
    sessions_interfere=True,
)
