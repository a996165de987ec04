"""What a model's distribution over processes asks of a training loop.

The wrapper is looked for through `torch.compile`'s. Fully sharded models of torch's first kind
(`FullyShardedDataParallel`) hold parts of the parameters in each process, so that norms and
overflows seen in one are not the model's; those of the second kind (`fully_shard`) hold DTensors,
for which torch's own functions give the same answer in every process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel around the user's model, compiled or not."""
    module: Any = model
    while isinstance(module, nn.Module):
        if isinstance(module, DistributedDataParallel):
            return module
        module = getattr(module, "_orig_mod", None)
    return None


def is_sharded_by_fsdp1(model: nn.Module) -> bool:
    """Whether any part of the model is in a FullyShardedDataParallel."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who wraps a model has imported it
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def no_sync(model: nn.Module) -> AbstractContextManager[Any]:
    """The model's own `no_sync()` (DDP, FSDP1), or a context that does nothing."""
    own = getattr(find_ddp(model) or model, "no_sync", None)
    return own() if callable(own) else contextlib.nullcontext()


def average_gradients(model: nn.Module, gradients: Iterable[torch.Tensor]) -> None:
    """Do what DDP leaves undone under `no_sync`: average the gradients over the processes."""
    ddp = find_ddp(model)
    if ddp is None:
        return
    group = ddp.process_group
    for gradient in gradients:
        torch.distributed.all_reduce(gradient, group=group)
        gradient.div_(group.size())
