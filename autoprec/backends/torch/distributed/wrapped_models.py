"""What distributing a model over processes changes in its training loop.

Wrappers are looked for in all of the model: `torch.compile`'s may be outside, and the parts of a
GAN may have one each. Fully sharded models of torch's first kind (`FullyShardedDataParallel`) hold
parts of the parameters in each process, so that norms and overflows seen in one are not the
model's; those of the second kind (`fully_shard`) hold DTensors, for which torch's own functions
give the same answer in every process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def find_ddps(model: nn.Module) -> tuple[DistributedDataParallel, ...]:
    """Return the DistributedDataParallel around the user's model, or those around its parts."""
    return tuple(m for m in model.modules() if isinstance(m, DistributedDataParallel))


def is_sharded_by_fsdp1(model: nn.Module) -> bool:
    """Return whether any part of the model is in a FullyShardedDataParallel."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # wrapping a model imports it
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


@contextlib.contextmanager
def no_sync(wrappers: Iterable[nn.Module]) -> Iterator[None]:
    """Leave gradients unsynchronised in the wrappers that have a `no_sync()`."""
    with contextlib.ExitStack() as stack:
        for wrapper in wrappers:
            own = getattr(wrapper, "no_sync", None)
            if callable(own):
                stack.enter_context(own())
        yield


def average_gradients(
    ddps: Iterable[DistributedDataParallel], parameters: Iterable[nn.Parameter]
) -> None:
    """Average the gradients over the processes, as DDP does outside `no_sync`."""
    gradients = {id(p): p.grad for p in parameters if p.grad is not None}
    for ddp in ddps:
        group = ddp.process_group
        for gradient in (gradients[id(p)] for p in ddp.parameters() if id(p) in gradients):
            torch.distributed.all_reduce(gradient, group=group)
            gradient.div_(group.size())
