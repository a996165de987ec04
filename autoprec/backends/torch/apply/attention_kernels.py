"""Lets `scaled_dot_product_attention` prefer one of its kernels wherever a model is called.

Where that kernel cannot compute a call (float32, a mask, an odd width), PyTorch takes another one,
as it does without a preference. The preference is in the forward pass, so that compiled code holds
it: a compiler's cache does not know of settings of the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoprec.backends.torch.apply.change_report import Skipped
from autoprec.backends.torch.apply.forward_wrappers import ForwardWrapper, install_wrapper
from autoprec.core.recipe import ATTENTION

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

#: A CPU has no others, and takes them in an order of its own.
_OF_CPU = ("flash", "math")


class PreferredAttention(ForwardWrapper):
    """Calls a module with these kernels for its attention, by name, the preferred one first."""

    def __init__(self, module: nn.Module, kernels: tuple[str, ...], ordered: bool) -> None:
        super().__init__(module)
        self.kernels, self.ordered = kernels, ordered  # torch's own names cannot be pickled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        kernels = [_KERNELS[name] for name in self.kernels]
        with sdpa_kernel(kernels, set_priority=self.ordered):
            return self.call(*args, **kwargs)


def prefer_attention(
    modules: Iterable[nn.Module], name: str, device_type: str
) -> tuple[Skipped, ...]:
    """Let these modules prefer a kernel; return why they do not where the device has none such."""
    ordered = device_type != "cpu"
    if name == "default":
        return ()
    if not ordered and name not in _OF_CPU:
        return (Skipped("", ATTENTION, f"a CPU has {' and '.join(_OF_CPU)} kernels, not {name}"),)
    others = _KERNELS if ordered else ("math",)
    kernels = tuple(dict.fromkeys([name, *others]))
    for module in modules:
        install_wrapper(PreferredAttention(module, kernels, ordered))
    return ()
