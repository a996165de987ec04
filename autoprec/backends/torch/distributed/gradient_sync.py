"""When the ranks reduce gradients: once an update, unless told otherwise.

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
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoprec.backends.torch.distributed.sharding import (
    reduce_deferred,
    set_gradient_sync,
    sharded_roots,
    without_gradient_sync,
)


class GradientSync:
    """Leaves the gradients of micro-batches before a boundary unreduced.

    DistributedDataParallel is told in the forward pass, FSDP2 in the backward pass. With
    `each_microbatch` every backward pass reduces.
    """

    def __init__(self, model: nn.Module, *, each_microbatch: bool = False) -> None:
        self._model, self._each = model, each_microbatch
        self._ddps, self._roots = find_ddps(model), sharded_roots(model)
        self._deferred = False

    @property
    def keeps_gradients_in_buckets(self) -> bool:
        """Return whether gradients lie in buffers that the next backward pass writes to."""
        return any(ddp.gradient_as_bucket_view for ddp in self._ddps)

    def forward_between_boundaries(self) -> AbstractContextManager[Any]:
        """Return the context for the forward pass of a micro-batch that is not the last one."""
        if self._each or self._roots:
            return contextlib.nullcontext()
        return _no_sync(self._ddps or (self._model,))

    def before_backward(self, *, on_boundary: bool) -> None:
        """Say, before a backward pass, whether it completes an update."""
        defer = not (on_boundary or self._each)
        if defer != self._deferred:
            set_gradient_sync(self._roots, not defer)
            self._deferred = defer

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which neither forward nor backward passes reduce gradients."""
        if self._roots:
            return without_gradient_sync(self._roots)
        return _no_sync(self._ddps or (self._model,))

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reduce the gradients of an accumulation that ended between boundaries."""
        if self._deferred:
            reduce_deferred(self._roots)
            self._deferred = False
        if not self._each:
            _average_gradients(self._ddps, parameters)


def find_ddps(model: nn.Module) -> tuple[DistributedDataParallel, ...]:
    """Return the DistributedDataParallel around the user's model, or those around its parts."""
    return tuple(m for m in model.modules() if isinstance(m, DistributedDataParallel))


def is_sharded_by_fsdp1(model: nn.Module) -> bool:
    """Return whether any part of the model is in a FullyShardedDataParallel."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # wrapping a model imports it
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


@contextlib.contextmanager
def _no_sync(wrappers: Iterable[nn.Module]) -> Iterator[None]:
    """Leave gradients unsynchronised in the wrappers that have a `no_sync()`."""
    with contextlib.ExitStack() as stack:
        for wrapper in wrappers:
            own = getattr(wrapper, "no_sync", None)
            if callable(own):
                stack.enter_context(own())
        yield


def _average_gradients(
    ddps: Iterable[DistributedDataParallel], parameters: Iterable[nn.Parameter]
) -> None:
    """Average the gradients over the processes, as DDP does outside `no_sync`."""
    gradients = {id(p): p.grad for p in parameters if p.grad is not None}
    for ddp in ddps:
        group = ddp.process_group
        for gradient in (gradients[id(p)] for p in ddp.parameters() if id(p) in gradients):
            torch.distributed.all_reduce(gradient, group=group)
            gradient.div_(group.size())
