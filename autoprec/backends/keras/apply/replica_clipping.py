"""Lets an optimizer clip the gradient of the whole batch, not that of each replica.

Keras clips before it sums gradients over the replicas, each of them divided by their number: the
limit would be as many times looser as there are replicas.
"""

from __future__ import annotations

from typing import Any

from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.backends.keras.apply.replicas import sum_over_replicas


def reduce_before_clipping(optimizer: Any, hooks: InstalledHooks) -> None:
    """Make a Keras optimizer reduce its gradients before it clips them, and only then."""
    for name, kind in (
        ("_clip_gradients", ReducingClip),
        ("_all_reduce_sum_gradients", ReductionUnlessClipped),
    ):
        hooks.install(optimizer, name, kind(getattr(optimizer, name), optimizer))


class ReducingClip(Hook):
    """An optimizer's `_clip_gradients`, of gradients summed over the replicas."""

    def __init__(self, original: Any, optimizer: Any) -> None:
        super().__init__(original)
        self.optimizer = optimizer

    def __call__(self, grads: Any) -> Any:
        """Reduce where something is clipped, then clip."""
        return self.original(sum_over_replicas(grads) if _clips(self.optimizer) else grads)


class ReductionUnlessClipped(Hook):
    """An optimizer's `_all_reduce_sum_gradients`, left out where clipping has reduced them."""

    def __init__(self, original: Any, optimizer: Any) -> None:
        super().__init__(original)
        self.optimizer = optimizer

    def __call__(self, grads_and_vars: Any) -> Any:
        """Reduce what is not reduced yet."""
        return grads_and_vars if _clips(self.optimizer) else self.original(grads_and_vars)


def _clips(optimizer: Any) -> bool:
    limits = (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm)
    return any(limit is not None for limit in limits)
