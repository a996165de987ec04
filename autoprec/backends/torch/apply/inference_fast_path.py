"""Keeps attention modules off torch's inference fast path where it does not know of autocast.

In evaluation mode nn.TransformerEncoder, its layers and nn.MultiheadAttention call kernels of their
own, unless autocast is on. They ask for CUDA's autocast alone: under that of another device an
encoder with padding raises a dtype clash, and the others skip the modules inside, float32 islands
with them. Training mode never takes that path.

The switch is torch's and holds for the whole process, so it is off only while such a module runs
under autocast; a model without one pays nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.float32_islands import in_island
from autoprec.backends.torch.apply.forward_wrappers import ForwardWrapper, install_wrapper

_NOT_CONCERNED = ("cuda", "mps")  # torch asks for CUDA's autocast, and has no fast path on Metal


class _Switch:
    """Turns the fast path off while anybody wants that, in whichever thread."""

    def __init__(self) -> None:
        self._lock, self._wanted, self._before = threading.Lock(), 0, True

    @contextlib.contextmanager
    def off(self) -> Iterator[bool]:
        """Turn it off, and yield what it was; the last one to leave puts it back."""
        with self._lock:
            if self._wanted == 0:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._wanted += 1
        try:
            yield self._before
        finally:
            with self._lock:
                self._wanted -= 1
                if self._wanted == 0:
                    torch.backends.mha.set_fastpath_enabled(self._before)


_SWITCH = _Switch()


def without_fast_path() -> contextlib.AbstractContextManager[bool]:
    """Keep every module off the fast path inside."""
    return _SWITCH.off()


class WithoutFastPath(ForwardWrapper):
    """Runs an attention module without the fast path wherever autocast is on.

    The switch cannot be compiled. There `asked`, an attribute of the module's own that torch asks
    for as well, is `refusal` while the module runs; nn.MultiheadAttention has none and needs none.
    """

    asked: str = ""
    refusal: int = 0

    def __init__(self, module: nn.Module, device_type: str) -> None:
        super().__init__(module)
        self.device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, with the fast path off if autocast is on, or an island is calling."""
        if self.module.training or not self._casts():
            return self.call(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        with _SWITCH.off():
            return self.call(*args, **kwargs)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        if not self.asked:
            return self.call(*args, **kwargs)
        before = getattr(self.module, self.asked)
        setattr(self.module, self.asked, self.refusal)
        try:
            return self.call(*args, **kwargs)
        finally:
            setattr(self.module, self.asked, before)

    def _casts(self) -> bool:
        return torch.is_autocast_enabled(self.device_type) or in_island(self.device_type)


class LayerWithoutFastPath(WithoutFastPath):
    """Does so with one layer of an encoder."""

    asked = "activation_relu_or_gelu"


class EncoderWithoutFastPath(WithoutFastPath):
    """Does so with an encoder, and leaves in padding what the fast path does: zeros, normalised.

    So an encoder in evaluation mode gives the same with and without autocast.
    """

    asked = "use_nested_tensor"
    refusal = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the encoder; torch looks at the mode of its first layer."""
        if self._encoder.layers[0].training or not self._casts():
            return self.call(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        with _SWITCH.off() as was_on:
            outputs = self.call(*args, **kwargs)
        plain = type(self.module).forward is nn.TransformerEncoder.forward
        padding = self._nested_padding(*args, **kwargs) if was_on and plain else None
        if padding is None:
            return outputs
        norm, zeros = self._encoder.norm, torch.zeros_like(outputs[:1, :1])
        filling = zeros if norm is None else norm(zeros).to(outputs.dtype)
        return torch.where(padding.unsqueeze(-1), filling, outputs)

    @property
    def _encoder(self) -> nn.TransformerEncoder:
        assert isinstance(self.module, nn.TransformerEncoder)
        return self.module

    def _nested_padding(
        self,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor | None:
        """Return the padding that the fast path would have cut off; None where it would not run.

        The conditions are those of torch's `TransformerEncoder.forward`.
        """
        encoder, padding = self._encoder, src_key_padding_mask
        if mask is not None or padding is None or src.dim() != 3 or src.is_nested:
            return None
        if not getattr(encoder, "use_nested_tensor", False):
            return None
        if torch.is_grad_enabled() and (
            src.requires_grad or any(p.requires_grad for p in encoder.layers[0].parameters())
        ):
            return None
        if padding.dtype is not torch.bool:
            padding = padding != 0
        checked = getattr(encoder, "mask_check", True)
        if checked and not torch._nested_tensor_from_mask_left_aligned(src, ~padding):
            return None
        return padding


def leave_fast_path(model: nn.Module, device_type: str) -> None:
    """Wrap the attention modules in `model`, where their fast path would run under autocast.

    To be called before islands are made: these turn autocast on and off around what is wrapped.
    """
    if device_type in _NOT_CONCERNED:
        return
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            install_wrapper(EncoderWithoutFastPath(module, device_type))
        elif isinstance(module, nn.TransformerEncoderLayer):
            install_wrapper(LayerWithoutFastPath(module, device_type))
        elif isinstance(module, nn.MultiheadAttention):
            install_wrapper(WithoutFastPath(module, device_type))
