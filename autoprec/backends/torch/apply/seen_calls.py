"""Notes calls in the first steps of a loop: of the model, its autocast and weights; zero_grad().

Optimizers of people's own classes and functional updates (`torch.func`) step without a hook of
torch's. What they do shows in the weights of one call that are not those of an earlier one.
"""

from __future__ import annotations

import os
import sys
import types
import weakref
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

CALLS = 4
"""Calls of a model after which its weights are compared with those of the first one."""

_MOST_PARAMETERS, _MOST_VALUES = 64, 16
"""How many of its parameters are compared, and how many numbers of each."""


_PACKAGES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[3]}{os.sep}")


class SeenForwards:
    """Notes the autocast under which a model is called; a copy of it takes itself away."""

    def __init__(self, device_type: str = "", *, is_copy: bool = False) -> None:
        self.device_type, self.is_copy = device_type, is_copy
        self.dtypes: set[torch.dtype | None] = set()
        self.calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> SeenForwards:
        """Return one that nobody asks what it saw."""
        return SeenForwards(is_copy=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied_hook, ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Note a call that gradients will flow through."""
        if torch.compiler.is_compiling():
            return
        if self.is_copy:
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]
        elif torch.is_grad_enabled():
            self.calls += 1
            on = torch.is_autocast_enabled(self.device_type)
            self.dtypes.add(torch.get_autocast_dtype(self.device_type) if on else None)


def _copied_hook() -> SeenForwards:
    return SeenForwards(is_copy=True)


class SeenZeroGrad:
    """Stands in for the `zero_grad` of a model or an optimizer, and notes a call from outside."""

    def __init__(self, owner: Any, note: Callable[[Any], None]) -> None:
        self._owner = weakref.ref(owner)
        self._note = note

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients as the owner's class does."""
        owner: Any = self._owner()
        if not is_ours(sys._getframe(1)):
            self._note(owner)
        type(owner).zero_grad(owner, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the copied owner's own method."""
        owner: Any = self._owner()
        return types.MethodType(type(owner).zero_grad, memo.get(id(owner), owner))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner(), "zero_grad")


class SeenUpdates:
    """Tells from a model's calls in training whether its weights change meanwhile.

    They are compared with those of the first call at the fourth, the eighth, the sixteenth call and
    so on. Code under `torch.func` calls a model with other tensors in place of its parameters.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._before: dict[str, torch.Tensor] = {}

    def are_seen_by(self, root: nn.Module) -> bool:
        """Note a call of `root` to come; return whether it has other weights than at first."""
        self.calls += 1
        if self.calls > 1 and (self.calls < CALLS or self.calls & (self.calls - 1)):
            return False
        parameters = list(islice(root.named_parameters(), _MOST_PARAMETERS))
        if not all(isinstance(each, nn.Parameter) for _, each in parameters):
            return self.calls >= CALLS
        if torch._C._functorch.maybe_current_level() is not None:
            return False
        now = {
            name: each.detach().flatten()[:_MOST_VALUES].to("cpu", copy=True)
            for name, each in parameters
            if type(each) is nn.Parameter and not each.is_meta
        }
        if self.calls == 1:
            self._before = now
        both = [(now[name], self._before[name]) for name in now.keys() & self._before]
        return any(one.dtype == other.dtype and not one.equal(other) for one, other in both)


def is_ours(frame: types.FrameType) -> bool:
    """Return whether a frame is of torch's code or of this package's."""
    return frame.f_code.co_filename.startswith(_PACKAGES)
