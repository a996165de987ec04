"""Models under FSDP2's `fully_shard`, whose parameters are DTensors: a part on every rank.

`torch.distributed.fsdp` is imported only where a model may be sharded: it takes a second.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that `fully_shard` was called on, the outermost first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # sharding a model imports it
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [m for m in model.modules() if isinstance(m, kind)]


def sharded_roots(model: nn.Module) -> list[FSDPModule]:
    """Return the outermost of the modules that `fully_shard` was called on."""
    roots: list[FSDPModule] = []
    inside: set[int] = set()
    for module in sharded_modules(model):
        if id(module) not in inside:
            roots.append(module)
            inside.update(id(each) for each in module.modules())  # type: ignore[attr-defined]
    return roots


def reshard(model: nn.Module) -> None:
    """Let every sharded module hold its sharded parameters, the ones that an optimizer updates.

    After a forward pass without a backward pass the root holds gathered copies of them.
    """
    for module in sharded_modules(model):
        module.reshard()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether each rank holds a part of a tensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor of which each rank holds a part; every rank calls this."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def part_like(whole_tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `whole_tensor`, which every rank has, on the device of `like` and sharded as it is."""
    moved = whole_tensor.to(device=like.device, dtype=like.dtype)
    if not hasattr(like, "full_tensor"):
        return moved
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    placements: Any = like.placements  # type: ignore[attr-defined]
    part: torch.Tensor = distribute_tensor(moved, mesh, placements, src_data_rank=None)
    return part


def set_gradient_sync(roots: list[FSDPModule], enabled: bool) -> None:
    """Say whether backward passes reduce gradients; FSDP2 has no `no_sync()`."""
    for root in roots:
        root.set_requires_gradient_sync(enabled)


@contextlib.contextmanager
def without_gradient_sync(roots: list[FSDPModule]) -> Iterator[None]:
    """Leave the gradients of backward passes inside unreduced: the next one outside adds them."""
    set_gradient_sync(roots, False)
    try:
        yield
    finally:
        set_gradient_sync(roots, True)


def reduce_deferred(roots: list[FSDPModule]) -> None:
    """Reduce what backward passes without synchronisation left, as the next one would.

    FSDP2 has no public call for it. What ends every backward pass does it for parameters whose
    turn did not come.
    """
    set_gradient_sync(roots, True)
    for root in roots:
        root._get_fsdp_state()._root_post_backward_final_callback()
