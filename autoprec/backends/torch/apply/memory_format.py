"""The memory format: weights and inputs as channels_last, optimizer state as its weights.

The state must follow: torch's fused optimizers walk weights and state as flat memory, and on the
CPU they do so without checking that the strides agree. So the state is laid out when the weights
are, after every `load_state_dict`, and is saved contiguous, so that a checkpoint is right in a
process that knows nothing of this one's layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autoprec.backends.torch.apply.forward_wrappers import ForwardWrapper
from autoprec.backends.torch.apply.nested_tensors import to_channels_last


class ChannelsLastInputs(ForwardWrapper):
    """Lays a model's 4-d floating-point inputs out as channels_last.

    A loader that yields channels_last already makes this free.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Lay out the inputs; call the model."""
        return self.call(*to_channels_last(args), **to_channels_last(kwargs))


class ChannelsLast:
    """Lays out models and optimizers as channels_last, keeps it over loading, and undoes it."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._hooks: list[Any] = []

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Change strides only: every Parameter, value and state entry stays."""
        self._model = model
        _lay_out(model, torch.channels_last)
        self.add(optimizers)

    def add(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Lay out further optimizers' state, if the model is laid out."""
        if self._model is None:
            return
        self._optimizers = (*self._optimizers, *optimizers)
        for optimizer in optimizers:
            follow_parameters(optimizer)
            self._hooks.append(optimizer.register_load_state_dict_post_hook(follow_parameters))
            self._hooks.append(optimizer.register_state_dict_post_hook(_save_contiguous))

    def undo(self) -> None:
        """Lay everything out as contiguous again."""
        for hook in self._hooks:
            hook.remove()
        if self._model is not None:
            _lay_out(self._model, torch.contiguous_format)
        for optimizer in self._optimizers:
            follow_parameters(optimizer)
        self._model, self._optimizers, self._hooks = None, (), []


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give state tensors of a parameter's shape that parameter's strides."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            if value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _lay_out(model: nn.Module, memory_format: torch.memory_format) -> None:
    tensors: Iterable[Tensor] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        if is_lazy(tensor) or tensor.dim() != 4:
            continue
        tensor.data = tensor.data.contiguous(memory_format=memory_format)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.contiguous(memory_format=memory_format)


def _save_contiguous(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    for index, state in saved["state"].items():
        saved["state"][index] = {
            name: value.contiguous() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
