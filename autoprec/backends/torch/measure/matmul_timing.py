"""PyTorch's matrix products and copies, for `autoprec.backends.shared.matmul_timing` to time."""

from __future__ import annotations

from typing import Any

import torch

from autoprec.backends.torch.devices import resolve_device
from autoprec.backends.torch.dtypes import TORCH_DTYPES
from autoprec.core.dtypes import DType


class TorchArithmetic:
    """Products on one torch device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self, dtype: DType, size: int) -> Any:
        """Make two operands and a buffer for their product; keep float32 from running as TF32."""
        if dtype not in TORCH_DTYPES:
            raise ValueError(f"{dtype} products are not measured with PyTorch")
        if self._device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = dtype is DType.TF32
        elif self._device.type == "xpu":
            torch.backends.mkldnn.allow_tf32 = dtype is DType.TF32  # type: ignore[assignment]
        whole = (torch.randn(size, size, device=self._device) for _ in range(2))
        operands = [each.to(TORCH_DTYPES[dtype]) for each in whole]
        return *operands, torch.empty_like(operands[0])

    def multiply(self, operands: Any) -> None:
        """Multiply, and wait for the device."""
        a, b, product = operands
        torch.matmul(a, b, out=product)
        self._wait()

    def prepare_copy(self, size_bytes: int) -> Any:
        """Make a source and a target."""
        source = torch.ones(size_bytes // 4, dtype=torch.float32, device=self._device)
        return source, torch.empty_like(source)

    def copy(self, operands: Any) -> None:
        """Copy, and wait for the device."""
        source, target = operands
        target.copy_(source)
        self._wait()

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def open_device(address: str) -> TorchArithmetic:
    """Open "cpu", "cuda:1", "xpu:0" or "mps"; raise what PyTorch raises where there is none."""
    device = resolve_device(address)
    torch.empty(1, device=device)
    return TorchArithmetic(device)
