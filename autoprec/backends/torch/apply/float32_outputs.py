"""Casts the model's outputs to float32, and lays its inputs out as its weights are.

A mixed policy ends where the model does: its outputs are cast up, so that a loss computed from them
is float32 under autocast, too (the CPU's autocast, unlike CUDA's, keeps several losses in the
compute dtype). The modules that compute the last activation themselves, which run in float32 as
islands do, are found in `output_layers`.
"""

from __future__ import annotations

from typing import Any

from autoprec.backends.torch.apply.forward_wrappers import ForwardWrapper
from autoprec.backends.torch.apply.tensors import to_channels_last, to_float32


class Float32Outputs(ForwardWrapper):
    """Casts what a model returns up to float32."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; cast its outputs."""
        return to_float32(self.call(*args, **kwargs))


class ChannelsLastInputs(ForwardWrapper):
    """Lays a model's 4-d floating-point inputs out as channels_last.

    A loader that yields channels_last already makes this free.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Lay out the inputs; call the model."""
        return self.call(*to_channels_last(args), **to_channels_last(kwargs))
