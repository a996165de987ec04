"""When the ranks reduce gradients: once an update, unless told otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from autoprec.backends.torch.distributed.sharding import (
    reduce_deferred,
    set_gradient_sync,
    sharded_roots,
    without_gradient_sync,
)
from autoprec.backends.torch.distributed.wrapped_models import (
    average_gradients,
    find_ddps,
    no_sync,
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
        return no_sync(self._ddps or (self._model,))

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
        return no_sync(self._ddps or (self._model,))

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reduce the gradients of an accumulation that ended between boundaries."""
        if self._deferred:
            reduce_deferred(self._roots)
            self._deferred = False
        if not self._each:
            average_gradients(self._ddps, parameters)
