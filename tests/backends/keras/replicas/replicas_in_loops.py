"""Cases of a loop of the script's own on two replicas."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning
from tests.backends.keras.keras_models import data, softmax_net
from tests.backends.keras.replicas.replica_pairs import assert_equal, case, mirrored, sgd


def loop(model: Any, precision: Any, x: Any, y: Any, strategy: Any = None) -> list[float]:
    """Train as TensorFlow's guide to custom loops does; return the loss of each batch."""
    strategy = strategy or tf.distribute.get_strategy()
    size = precision.global_batch_size
    with strategy.scope():
        per_sample = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = per_sample(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=size)
            scaled = precision.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        precision.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def train(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    if strategy.num_replicas_in_sync > 1:  # what replicas are compared with needs no graph
        train = tf.function(train)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(size)
    return [float(train(b)) for b in strategy.experimental_distribute_dataset(batches)]


def looped(
    recipe: Recipe, strategy: Any, x: Any, y: Any, build: Any = softmax_net
) -> tuple[Any, Any, list[float]]:
    keras.utils.set_random_seed(3)
    with (strategy or tf.distribute.get_strategy()).scope():
        model, optimizer = build(), sgd()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoprecWarning)
        precision = KerasSurgeon().apply(recipe, model=model, optimizers=[optimizer])
    return model, precision, loop(model, precision, x, y, strategy)


@case
def a_custom_loop_trains_like_one_process() -> None:
    x, y = data(96)
    for recipe in (Recipe(batch_size=16), Recipe(batch_size=8, accumulation_steps=4)):
        one, _, alone = looped(recipe, None, x, y)
        two, precision, shared = looped(recipe, mirrored(), x, y)
        assert_equal(one, two)
        if recipe.accumulation_steps == 1:
            np.testing.assert_allclose(shared, alone, atol=1e-5)
        assert precision.steps == 96 // recipe.effective_batch


@case
def a_custom_loop_flushes_what_is_left() -> None:
    x, y = data(80)
    recipe = Recipe(batch_size=8, accumulation_steps=4)
    one, alone, _ = looped(recipe, None, x, y)
    two, shared, _ = looped(recipe, mirrored(), x, y)
    assert (alone.flush(), shared.flush()) == (True, True)
    assert_equal(one, two)
    assert shared.flush() is False


@case
def a_custom_loop_trains_in_mixed_precision() -> None:
    x, y = data(96)
    for policy in (Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16):
        recipe = Recipe(batch_size=16, accumulation_steps=2).with_policy(policy)
        one, _, _ = looped(recipe, None, x, y)
        two, precision, losses = looped(recipe, mirrored(), x, y)
        assert_equal(one, two, atol=2e-2)
        assert (precision.steps, precision.skipped) == (3, 0)
        assert np.isfinite(losses).all()
