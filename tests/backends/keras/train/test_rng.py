"""What data draw, by whichever library, does not depend on the models built meanwhile."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.keras.train.data import batches
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
