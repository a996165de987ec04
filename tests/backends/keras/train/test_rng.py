"""What data draw, by whichever library, does not depend on the models built meanwhile."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.keras.train.data import batches
from autoprec.backends.keras.train.rng import same_in_every_dtype
from autoprec.backends.protocol import Task
from tests.backends.keras.keras_models import softmax_net

DRAWS = {
    "numpy": lambda n: np.random.normal(size=(n, 8)),
    "keras": lambda n: keras.random.normal((n, 8)),
    "tensorflow": lambda n: tf.random.normal((n, 8)),
}


@pytest.mark.parametrize("library", DRAWS)
def test_data_are_the_same_whatever_is_built_and_drawn_meanwhile(library):
    def build_data(batch_size: int) -> Any:
        for _ in range(4):
            yield DRAWS[library](batch_size), np.zeros(batch_size, "int32")

    def drawn(meanwhile: Any) -> list[Any]:
        found = []
        for x, _ in batches(task, 8, 0):
            found.append(np.asarray(x))
            meanwhile()
        return found

    def train() -> None:
        keras.utils.set_random_seed(0)  # as before every model that is built
        softmax_net().train_on_batch(np.zeros((8, 8)), np.zeros(8))
        np.random.normal()
        keras.random.normal((2,))

    task = Task(name="task.py", build_model=softmax_net, build_data=build_data)
    alone, beside_training = drawn(lambda: None), drawn(train)
    assert len({float(x[0, 0]) for x in alone}) == 4
    for mine, theirs in zip(beside_training, alone, strict=True):
        assert np.array_equal(mine, theirs)


def test_what_data_draw_does_not_change_training():
    def build_data(batch_size: int) -> Any:
        for draw in DRAWS.values():
            draw(batch_size)
            yield np.zeros((batch_size, 8)), np.zeros(batch_size)

    task = Task(name="task.py", build_model=softmax_net, build_data=build_data)

    def outside() -> list[float]:
        return [float(np.asarray(draw(1))[0, 0]) for draw in DRAWS.values()]

    keras.utils.set_random_seed(1)
    expected = [outside(), outside()]
    keras.utils.set_random_seed(1)
    found = [outside()]
    assert len(list(batches(task, 8, 5))) == 3
    assert [*found, outside()] == expected


ONES = np.ones(64, "float32")

BY_DTYPE = {
    "dropout": lambda dtype, seed, _: keras.random.dropout(tf.cast(ONES, dtype), 0.5, seed=seed),
    "gamma": lambda dtype, seed, _: keras.random.gamma((64,), 2.0, dtype, seed=seed),
    "beta": lambda dtype, seed, _: keras.random.beta((64,), 2.0, 3.0, dtype=dtype, seed=seed),
    "binomial": lambda dtype, seed, _: keras.random.binomial((64,), 9.0, 0.5, dtype, seed=seed),
    "tf.nn.dropout": lambda dtype, *_: tf.nn.dropout(tf.cast(ONES, dtype), 0.5, seed=3),
    "stateless dropout": lambda dtype, *_: tf.nn.experimental.stateless_dropout(
        tf.cast(ONES, dtype), 0.5, seed=[1, 2]
    ),
    "tf.random": lambda dtype, *_: tf.random.uniform(
        (64,), tf.constant(0.25, dtype), 0.5, dtype, 3
    ),
    "stateless": lambda dtype, *_: tf.random.stateless_normal((64,), [1, 2], dtype=dtype),
    "generator": lambda dtype, _, own: own.truncated_normal((64,), dtype=dtype),
}


@pytest.mark.parametrize("name", BY_DTYPE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_same_numbers_are_drawn_in_every_dtype_then_rounded(name, dtype):
    def drawn(dtype: str) -> Any:
        tf.random.set_seed(1)
        seeds = keras.random.SeedGenerator(3), tf.random.Generator.from_seed(3)
        return tf.function(lambda: BY_DTYPE[name](dtype, *seeds))()

    functions = (tf.nn.dropout, tf.random.Generator.normal, keras.src.backend.random.normal)
    exact = drawn("float32")
    with same_in_every_dtype():
        same, found = drawn("float32"), drawn(dtype)
    np.testing.assert_array_equal(same, exact)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, tf.cast(exact, dtype))
    held = (tf.nn.dropout, tf.random.Generator.normal, keras.src.backend.random.normal)
    assert held == functions
