"""Ties a loss scaler to the model whose buffers go back where a step is skipped."""

from __future__ import annotations

from torch import nn

from autoprec.backends.torch.apply.float32_islands import Float32Outputs
from autoprec.backends.torch.apply.forward_wrappers import wrappers_on
from autoprec.backends.torch.apply.kept_buffers import KeptBuffers
from autoprec.backends.torch.apply.loss_scaler import LossScaler


def keep_buffers(scaler: LossScaler, root: nn.Module, device_type: str) -> None:
    """Keep the buffers of `root` for `scaler`, if that is enabled."""
    if not scaler.is_enabled():
        return
    scaler.buffers = kept = KeptBuffers(root, device_type)
    for wrapper in wrappers_on(root):
        if isinstance(wrapper, Float32Outputs):
            wrapper.kept_buffers = kept


def forget_buffers(scaler: LossScaler) -> None:
    """Keep them no longer."""
    if scaler.buffers is not None:
        scaler.buffers.forget()
        scaler.buffers = None
