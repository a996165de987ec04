"""Weighs the loss of each replica by its share of the batch, so that an uneven one trains as whole.

Keras gives the means of all replicas the same weight. Where the last batch of an epoch leaves one
with fewer samples, each of those would count for more than in a single process. Only what Keras's
own train_step computes is weighed: a train_step of the user's decides that itself.
"""

from __future__ import annotations

import threading
from typing import Any

import keras
from keras import ops

from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.backends.keras.apply.replicas import mean_over_replicas

#: Reductions of a Keras loss that are means over the samples of one replica.
_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_WEIGHTED_MEAN = "mean_with_sample_weight"


class ReplicaShares:
    """The batch that each replica's train_step is given, while it runs."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._of_thread = threading.local()  # each replica is traced in a thread of its own

    def install(self, hooks: InstalledHooks, optimizers: tuple[Any, ...]) -> None:
        """Weigh what the model's train_step gives `optimizers` to scale."""
        hooks.install(self.model, "train_step", TrainStepHook(self.model.train_step, self))
        for optimizer in optimizers:
            hooks.install(optimizer, "scale_loss", WeighingHook(optimizer.scale_loss, self))

    def set_batch(self, batch: Any) -> None:
        """Take the batch of the calling replica; None once its step is over."""
        self._of_thread.batch = batch

    def weigh(self, loss: Any) -> Any:
        """Return a replica's loss times its number of samples over the mean of all replicas."""
        batch = getattr(self._of_thread, "batch", None)
        reductions = self._reductions()
        if batch is None or not reductions <= set(_MEANS):
            return loss
        weighted = reductions == {_WEIGHTED_MEAN}
        own = ops.cast(_count(batch, weighted=weighted), loss.dtype)
        share = ops.divide_no_nan(own, mean_over_replicas(own))
        return ops.multiply(loss, ops.stop_gradient(share))

    def _reductions(self) -> set[str]:
        """Return how the compiled losses are reduced; they are known once a loss was computed."""
        found = self.model._compile_loss._flat_losses or ()
        return {str(getattr(each.loss, "reduction", None)) for each in found}


def can_be_weighed(model: Any) -> bool:
    """Say whether the loss of a training step is what Keras computes of `compile`'s losses."""
    own = keras.Model
    return (
        getattr(model, "_compile_loss", None) is not None
        and type(model).train_step is own.train_step
        and type(model).compute_loss is own.compute_loss
    )


class TrainStepHook(Hook):
    """A model's `train_step`, that lets its batch be known."""

    def __init__(self, original: Any, shares: ReplicaShares) -> None:
        super().__init__(original)
        self.shares = shares

    def __call__(self, data: Any) -> Any:
        """Take the step."""
        self.shares.set_batch(data)
        try:
            return self.original(data)
        finally:
            self.shares.set_batch(None)


class WeighingHook(Hook):
    """An optimizer's `scale_loss`, of a loss weighed by the replica's share."""

    def __init__(self, original: Any, shares: ReplicaShares) -> None:
        super().__init__(original)
        self.shares = shares

    def __call__(self, loss: Any) -> Any:
        """Weigh the loss, then scale it as before."""
        return self.original(self.shares.weigh(loss))


def _count(batch: Any, *, weighted: bool) -> Any:
    """Count the samples of a batch, or sum their weights."""
    x, _, weights = keras.utils.unpack_x_y_sample_weight(batch)
    if weighted and ops.is_tensor(weights):
        return ops.sum(weights)
    first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    return ops.shape(first)[0]
