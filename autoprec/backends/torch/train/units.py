"""What a unit is: a module with code of its own, which can be kept in float32 as an island."""

from __future__ import annotations

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def has_own_code(module: nn.Module) -> bool:
    """Return whether a module computes anything itself instead of only holding others."""
    if isinstance(module, _CONTAINERS):
        return type(module).forward is not nn.Sequential.forward and "forward" in vars(type(module))
    return type(module).forward is not nn.Module.forward
