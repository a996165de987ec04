"""The `fused_optimizer` knob: torch's fused kernels for optimizers that are built already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoprec.backends.torch.apply.change_report import Skipped
from autoprec.backends.torch.apply.memory_format import follow_parameters
from autoprec.backends.torch.distributed.sharding import is_sharded

#: Optimizers whose fused kernels DTensor has a sharding strategy for (torch 2.13).
_FUSED_OVER_PARTS = (torch.optim.Adam, torch.optim.AdamW)


class FusedOptimizers:
    """Sets `fused=True` in optimizers' groups, keeps it over `load_state_dict`, and undoes it.

    Only the groups are changed, not the private flag that hands unscaling over to the kernel:
    a GradScaler goes on unscaling by itself, so that a checkpoint that brings another `fused`
    along can never leave gradients scaled.
    """

    def __init__(self) -> None:
        self._before: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self._hooks: list[Any] = []

    def apply(self, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Skipped, ...]:
        """Fuse every optimizer that can be, and name those that cannot."""
        skipped = []
        for optimizer in optimizers:
            reason = _why_not(optimizer)
            if reason:
                skipped.append(Skipped(type(optimizer).__name__, "fused_optimizer", reason))
                continue
            keep = ("fused", "foreach")
            self._before.append(
                (optimizer, [{key: g.get(key) for key in keep} for g in optimizer.param_groups])
            )
            _fuse(optimizer)
            self._hooks.append(optimizer.register_load_state_dict_post_hook(_fuse))
        return tuple(skipped)

    def undo(self) -> None:
        """Restore the groups' own settings."""
        for hook in self._hooks:
            hook.remove()
        for optimizer, groups in self._before:
            for group, before in zip(optimizer.param_groups, groups, strict=False):
                group.update(before)
        self._hooks.clear()
        self._before.clear()


def can_be_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` can be fused and was not told which kernels to use."""
    chosen = any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups)
    return not chosen and not _why_not(optimizer)


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    if "fused" not in optimizer.defaults:
        return "this optimizer has no fused kernels"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "a differentiable optimizer cannot be fused"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(torch.is_floating_point(p) for p in parameters):
        return "fused kernels need floating-point parameters"
    if any(map(is_sharded, parameters)) and not isinstance(optimizer, _FUSED_OVER_PARTS):
        return "of fused kernels torch runs only Adam's and AdamW's on the parts of fully_shard"
    return ""


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    follow_parameters(optimizer)
    for group in optimizer.param_groups:
        group["fused"] = True
        group["foreach"] = False
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, torch.Tensor) and step.device != parameter.device:
                # Fused kernels read the step count where the parameter lives.
                optimizer.state[parameter]["step"] = step.to(parameter.device)
