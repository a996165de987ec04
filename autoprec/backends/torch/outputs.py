"""The model's outputs in float32, always; and its inputs in the layout its weights have.

A mixed policy ends where the model does: its outputs are cast up, so that a loss computed from them
is float32 under autocast too (the CPU's autocast, unlike CUDA's, keeps several losses in the
compute dtype), and a last activation or a loss that is a module of the model runs in float32.
What is not seen: a softmax written as a function call in the model's own forward. Its result is
cast up, its arithmetic is autocast's; make the root an island ("" in float32_modules) to change it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.loss import _Loss

from autoprec.backends.torch.tensors import to_channels_last, to_float32
from autoprec.backends.torch.wrappers import ForwardWrapper

LAST_ACTIVATIONS = (
    nn.Softmax,
    nn.Softmax2d,
    nn.LogSoftmax,
    nn.Softmin,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.AdaptiveLogSoftmaxWithLoss,
)


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


def float32_ends(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that end the model: last activations and losses.

    A last activation is one among the root's direct children, or the last module of the tree in
    order of registration; activations deeper inside (attention) are left alone.
    """
    found = [path for path, module in model.named_modules() if isinstance(module, _Loss)]
    candidates = dict(model.named_children())
    leaves = [(path, m) for path, m in model.named_modules() if not any(True for _ in m.children())]
    if leaves:
        path, module = leaves[-1]
        candidates.setdefault(path, module)
    found += [path for path, module in candidates.items() if isinstance(module, LAST_ACTIVATIONS)]
    return tuple(dict.fromkeys(found))
