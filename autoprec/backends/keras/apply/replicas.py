"""Replicas of a `tf.distribute` strategy: how many train a model, and what they do together.

A replica sees its part of the batch and its own gradients. Where all have to take the same branch,
a strategy such as MirroredStrategy branches once for all of them, in `merge_call`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import keras
from keras import ops

from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.core.parallel.effective_batch import fit_to_world_size
from autoprec.core.recipe import Distributed, Recipe
from autoprec.errors import UsageError


def refuse_keras_distribution() -> None:
    """Raise `UsageError` where `keras.distribution` is to spread training over devices."""
    found = keras.distribution.distribution()
    if found is not None:
        raise UsageError(
            f"keras.distribution.{type(found).__name__} is set, and Keras implements it on JAX "
            f"alone: on {keras.config.backend()} it would train on one device. Build the model in "
            "the scope of a tf.distribute.MirroredStrategy, or call "
            "keras.distribution.set_distribution(None)"
        )


def replica_count(model: Any = None) -> int:
    """Return how many replicas train `model`; without one, those of the scope this is called in."""
    strategy = _strategy_in_scope() if model is None else _strategy_of(model)
    return 1 if strategy is None else int(strategy.num_replicas_in_sync)


def scope_of(model: Any) -> AbstractContextManager[Any]:
    """Return the scope that `model` was made in, for what belongs to its replicas."""
    strategy = _strategy_of(model)
    return nullcontext() if strategy is None else strategy.scope()


def scope_of_optimizer(optimizer: Any) -> AbstractContextManager[Any]:
    """Return the scope that `optimizer` was made in, unless there is one already."""
    strategy = _strategy_of_optimizer(optimizer)
    if strategy is None or _has_strategy() or not _is_distributed(strategy):
        return nullcontext()
    return strategy.scope()  # type: ignore[no-any-return]


def replica_parts(variable: Any, model: Any) -> tuple[Any, ...]:
    """Return what each replica of `model` in this process holds of a variable of its own."""
    strategy = _strategy_of(model)
    if strategy is None:
        return (variable,)
    return tuple(strategy.experimental_local_results(variable.value))


def refuse_fit_over_processes(model: Any, hooks: InstalledHooks) -> None:
    """Let `fit` say what is wrong where the replicas of `model` are in several processes."""
    strategy = _strategy_of(model)
    if strategy is None or not hasattr(model, "fit"):
        return
    import tensorflow as tf

    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and (
        strategy.extended._in_multi_worker_mode()
    ):
        hooks.install(model, "fit", RefusedFit(model.fit))


class RefusedFit(Hook):
    """The `fit` of a model whose replicas are in several processes, which Keras cannot run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `UsageError`."""
        raise UsageError(
            "fit was called on a model made under a MultiWorkerMirroredStrategy of several "
            "processes, and Keras 3 on TensorFlow does not support that (it fails on the first "
            "batch): train with a loop of your own, in strategy.run, as docs/scale.md shows, or "
            "use a MirroredStrategy of one process"
        )


def fit_to_replicas(recipe: Recipe, model: Any) -> tuple[Recipe, str | None]:
    """Return the recipe for the replicas of `model`, and a sentence that says what changed."""
    return fit_to_world_size(recipe, replica_count(model), Distributed(engine="mirrored"))


def for_whole_batches(recipe: Recipe, model: Any) -> Recipe:
    """Return the recipe for replicas that share batches of `recipe.batch_size`.

    Raises `UsageError` where a batch has fewer samples than there are replicas.
    """
    replicas = replica_count(model)
    if replicas == recipe.world_size:
        return recipe
    if recipe.batch_size < replicas:
        raise UsageError(
            f"a batch of {recipe.batch_size} given for {replicas} replicas, expected at least a "
            "sample for each"
        )
    section = recipe.distributed or Distributed(engine="mirrored")
    return replace(
        recipe,
        batch_size=recipe.batch_size // replicas,
        distributed=replace(section, world_size=replicas),
    )


def act_where(due: Callable[[], Any], action: Callable[[], None]) -> None:
    """Do `action` on every replica where `due` says so; called by each of them.

    `action` may itself reduce over the replicas, which TensorFlow forbids in a replica's branch.
    """
    if not _has_strategy() or _supports_no_merge_call():
        ops.cond(due(), action, lambda: None)
        return
    import tensorflow as tf

    def act_on_all(strategy: Any) -> None:
        def act() -> None:
            strategy.extended.call_for_each_replica(action)

        ops.cond(due(), act, lambda: None)

    tf.distribute.get_replica_context().merge_call(act_on_all)


def on_each_replica(action: Callable[[], None]) -> None:
    """Do `action` on every replica; called by each of them, or once for all of them."""
    if not _has_strategy() or _in_replica():
        action()
        return
    _strategy_in_scope().extended.call_for_each_replica(action)


def act_now(optimizer: Any, action: Callable[[], None]) -> None:
    """Do `action` on every replica that `optimizer` updates; called outside of them."""
    strategy = _strategy_of_optimizer(optimizer)
    if strategy is None or _in_replica() or not _is_distributed(strategy):
        action()
        return
    import tensorflow as tf

    tf.function(lambda: strategy.run(action), autograph=False)()


def sum_over_replicas(tensors: Any) -> Any:
    """Return the sums of tensors over the replicas; called by each of them."""
    import tensorflow as tf

    replica = tf.distribute.get_replica_context()
    return tensors if replica is None else replica.all_reduce(tf.distribute.ReduceOp.SUM, tensors)


def mean_over_replicas(value: Any) -> Any:
    """Return the mean of a tensor over the replicas; called by each of them."""
    if replica_count() == 1:
        return value
    import tensorflow as tf

    replica = tf.distribute.get_replica_context()
    return value if replica is None else replica.all_reduce(tf.distribute.ReduceOp.MEAN, value)


# Clipping ---------------------------------------------------------------------------------------


def reduce_before_clipping(optimizer: Any, hooks: InstalledHooks) -> None:
    """Make a Keras optimizer reduce its gradients before it clips them, and only then.

    Keras clips before it sums gradients over the replicas, each of them divided by their number:
    the limit would be as many times looser as there are replicas.
    """
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


# Shares of the loss -----------------------------------------------------------------------------

#: Reductions of a Keras loss that are means over the samples of one replica.
_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_WEIGHTED_MEAN = "mean_with_sample_weight"


class ReplicaShares:
    """The batch that each replica's train_step is given, while it runs, to weigh its loss by.

    Keras gives the means of all replicas the same weight. Where the last batch of an epoch leaves
    one with fewer samples, each of those would count for more than in a single process. Only what
    Keras's own train_step computes is weighed: one of the user's decides that itself.
    """

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


# The strategy -----------------------------------------------------------------------------------


def _strategy_of(model: Any) -> Any:
    """Return the strategy that `model` was made under, or None."""
    return getattr(model, "_distribute_strategy", None)


def _strategy_of_optimizer(optimizer: Any) -> Any:
    """Return the strategy that `optimizer` was made under, TensorFlow's default one without."""
    return getattr(optimizer, "_distribution_strategy", None)


def _strategy_in_scope() -> Any:
    if keras.config.backend() != "tensorflow":
        return None
    import tensorflow as tf

    return tf.distribute.get_strategy()


def _has_strategy() -> bool:
    """Say whether a strategy other than TensorFlow's default one is in scope."""
    if keras.config.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return bool(tf.distribute.has_strategy())


def _in_replica() -> bool:
    import tensorflow as tf

    return _has_strategy() and tf.distribute.get_replica_context() is not None


def _is_distributed(strategy: Any) -> bool:
    """Say whether `strategy` is another than TensorFlow's default one."""
    if _has_strategy():
        return strategy is _strategy_in_scope()
    with strategy.scope():
        return _has_strategy()


def _supports_no_merge_call() -> bool:
    import tensorflow as tf

    return bool(tf.__internal__.distribute.strategy_supports_no_merge_call())
