"""Replicas of a `tf.distribute` strategy: how many train a model, and what they do together.

A replica sees its part of the batch and its own gradients. Where all have to take the same branch,
a strategy such as MirroredStrategy branches once for all of them, in `merge_call`.
"""

from __future__ import annotations

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
