"""What makes a task's "float32" another precision before any recipe is tried.

16-bit weights, float64 ones, an autocast the model opens itself, and process-wide settings that let
float32 products be rounded. None is an error: the baseline and the proof's reference are then the
task as it is, and the report says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.dtypes import EXACT_DTYPES, LOW_DTYPES, dtype_name
from autoprec.core.dtypes import own_precision

_PRODUCT_SETTINGS = {"cuda": "cuda.matmul", "cpu": "mkldnn.matmul"}
"""Where torch keeps how products may be rounded. Convolutions may by default: that is plain.

Intel GPUs heed `mkldnn.allow_tf32` alone.
"""

_REDUCED_PRECISIONS = {
    "cuda": {"tf32": "TF32"},
    "cpu": {"bf16": "bfloat16"},  # what few CPUs do with TF32 is left out
}


def low_precision(model: nn.Module, autocasts: Collection[str], device_type: str) -> str:
    """Say what in the task is not plain float32; empty where everything is."""
    return "; ".join(_found(model, autocasts, device_type))


def _found(model: nn.Module, autocasts: Collection[str], device_type: str) -> Iterator[str]:
    low = [name for name, p in model.named_parameters() if p.dtype in LOW_DTYPES]
    if low:
        yield f"{len(low)} parameters are kept in 16 bits ({low[0]}, ...)"
    exact = [name for name, p in model.named_parameters() if p.dtype in EXACT_DTYPES]
    if exact:
        yield (
            f"{len(exact)} parameters are float64 ({exact[0]}, ...), which no policy makes faster: "
            "call model.float() in build_model"
        )
    if autocasts:
        where = min(autocasts) or "the model itself"
        yield f"the model opens autocast itself (seen in {where})"
    rounded = rounded_products(device_type)
    if rounded:
        yield (
            f"the task lets float32 matrix products be rounded to {rounded} "
            "(set_float32_matmul_precision, allow_tf32 or fp32_precision); the baseline and "
            "the check's float32 run with that too, and apply_profile leaves the setting to you"
        )


def computes_in(model: nn.Module, autocasts: Mapping[str, torch.dtype]) -> str:
    """Return the 16-bit dtype that the model computes in without a recipe; empty where in none.

    Its weights are kept in it, or their modules are called under an autocast of the model's own.
    """
    return own_precision(
        (dtype_name(autocasts.get(path, each.dtype)), each.numel(), each.requires_grad)
        for path, module in model.named_modules()
        for each in module.parameters(recurse=False)
    )


def rounded_products(device_type: str) -> str:
    """Return what the process may round float32 matrix products to; empty where to nothing."""
    if device_type == "xpu":
        return "TF32" if getattr(torch.backends.mkldnn, "allow_tf32", False) else ""
    owner: Any = torch.backends
    for name in _PRODUCT_SETTINGS.get(device_type, "none").split("."):
        owner = getattr(owner, name, None)
    setting = str(getattr(owner, "fp32_precision", "none"))
    return _REDUCED_PRECISIONS.get(device_type, {}).get(setting, "")


def rounded_convolutions(device_type: str) -> str:
    """Return what cuDNN may round float32 convolutions to, by default TF32; empty where nothing.

    Whether the GPU can is for the device's facts to say: the setting is the same on any.
    """
    if device_type != "cuda" or torch.version.hip is not None:
        return ""
    cudnn: Any = torch.backends.cudnn
    setting = getattr(getattr(cudnn, "conv", None), "fp32_precision", None)  # torch >= 2.9
    if setting is None:
        setting = "tf32" if cudnn.allow_tf32 else "ieee"
    return _REDUCED_PRECISIONS["cuda"].get(str(setting), "")


@contextlib.contextmanager
def noted_autocasts(model: nn.Module, device_type: str) -> Iterator[dict[str, torch.dtype]]:
    """Collect the modules that are called under an autocast while the context is open, and its."""
    found: dict[str, torch.dtype] = {}

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if torch.is_autocast_enabled(device_type):
                found[path] = torch.get_autocast_dtype(device_type)

        return hook

    handles = [module.register_forward_pre_hook(note(path)) for path, module in _hookable(model)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _hookable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield path, module
