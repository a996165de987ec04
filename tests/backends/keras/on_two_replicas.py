"""Run by test_keras_elsewhere in a process of its own: MirroredStrategy over two logical CPUs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import data, softmax_net

from autoprec.backends.keras.apply.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import UsageError


def main() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()]
    tf.config.set_logical_device_configuration(cpu, two)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        model = softmax_net(optimizer=keras.optimizers.SGD(0.1))
    x, y = data(32)
    for recipe in (
        Recipe(policy=Policy.MIXED_BFLOAT16),
        Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=64.0)),
    ):
        # outside the scope, as a training script would
        precision = KerasSurgeon().apply(recipe, model=model)
        before = model.get_weights()
        model.fit(x, y, batch_size=16, verbose=0)
        assert (precision.steps, precision.skipped) == (2, 0), recipe
        assert not np.array_equal(before[0], model.get_weights()[0])
    overflowing = x.copy()
    overflowing[8:16] = 6e4  # one replica's half of the second batch
    model.fit(overflowing[:16], y[:16], batch_size=16, verbose=0, shuffle=False)
    seen = (precision.steps, precision.skipped, precision.scale)
    assert seen == (2, 1, 32.0), seen
    precision = KerasSurgeon().apply(Recipe(accumulation_steps=2), model=model)
    with pytest.raises(UsageError, match="2 replicas"):
        model.fit(x, y, batch_size=16, verbose=0)
    print("all of it held")


if __name__ == "__main__":
    main()
