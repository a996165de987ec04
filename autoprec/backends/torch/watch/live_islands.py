"""Puts modules of a model that is being trained into float32 islands, from its next call on.

The wrappers of `float32_islands` are exchanged where they are; what else stands in for a module's
forward (padding, float8, layout, outputs) stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from autoprec.backends.torch.apply.float32_islands import (
    NEVER_CALLED,
    AutocastCalls,
    BackToAutocast,
    Float32Island,
    Float32Outputs,
    has_own_code,
    module_at,
)
from autoprec.backends.torch.apply.forward_wrappers import (
    ForwardWrapper,
    remove_wrappers,
    wrappers_on,
)
from autoprec.backends.torch.apply.memory_format import ChannelsLastInputs
from autoprec.core.measurement import Unit

_ISLANDS = (Float32Island, BackToAutocast)
_OUTSIDE = (AutocastCalls, Float32Outputs, ChannelsLastInputs)


def islands_of(root: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules whose own code runs in float32."""
    return tuple(
        path
        for path, module in root.named_modules()
        if any(isinstance(wrapper, Float32Island) for wrapper in wrappers_on(module))
    )


def set_islands(
    root: nn.Module, paths: Collection[str], *, owner: str, device_type: str, dtype: torch.dtype
) -> None:
    """Make the modules at `paths` the model's islands, instead of those it has."""
    islands = [module_at(root, path) for path in paths]
    chosen = {id(module) for module in islands}
    below = {id(each) for island in islands for each in island.modules()}
    for module in root.modules():
        remove_wrappers(module, lambda wrapper: isinstance(wrapper, _ISLANDS))
        if id(module) in below and not isinstance(module, NEVER_CALLED):
            kind = Float32Island if id(module) in chosen else BackToAutocast
            _insert(kind(module, device_type, dtype), owner)


def whole_model(root: nn.Module) -> tuple[str, ...]:
    """Return the paths that make everything float32: those of all modules with code of theirs."""
    return tuple(
        path
        for path, module in root.named_modules()
        if has_own_code(module) and not isinstance(module, NEVER_CALLED)
    )


def units_of(root: nn.Module) -> Iterator[Unit]:
    """Yield what may become an island besides those there are.

    A matrix of weights stands for the products with it.
    """
    have = islands_of(root)
    every = sum(parameter.numel() for parameter in root.parameters()) or 1
    for path, module in root.named_modules():
        if has_own_code(module) and path not in have and not isinstance(module, NEVER_CALLED):
            own = module.parameters(recurse=False)
            products = 0 if isinstance(module, nn.Embedding) else sum(_matrix(p) for p in own)
            yield Unit(path, type(module).__name__, products / every)


def _matrix(parameter: nn.Parameter) -> int:
    return parameter.numel() if parameter.dim() > 1 else 0


def _insert(wrapper: ForwardWrapper, owner: str) -> None:
    """Make `wrapper` part of its module's forward, inside of what handles inputs and outputs."""
    wrapper.owner = owner
    outer = None
    for each in wrappers_on(wrapper.module):
        if not isinstance(each, _OUTSIDE):
            break
        outer = each
    if outer is None:
        wrapper.module.__dict__["forward"] = wrapper
    else:
        wrapper.inner, outer.inner = outer.inner, wrapper
