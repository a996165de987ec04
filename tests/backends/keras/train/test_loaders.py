"""Loaders with workers and pipelines are used, stopped and used again, as a tuning does."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.train.data import batches
from autoprec.backends.protocol import Task
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from tests.backends.keras.keras_models import data, eagerly, softmax_net

QUICK = TimingBudget(seconds=0.1, min_steps=2, max_steps=3)


class Pieces(keras.utils.PyDataset):
    def __init__(self, size, **how):
        super().__init__(**how)
        self.size = size

    def __len__(self):
        return 32 // self.size

    def __getitem__(self, index):
        x, y = data(32)
        rows = slice(index * self.size, (index + 1) * self.size)
        return x[rows], y[rows]


KEPT = {
    "threads": Pieces(8, workers=2),
    "processes": Pieces(8, workers=2, use_multiprocessing=True, max_queue_size=4),
}


def threads(batch_size):
    return Pieces(batch_size, workers=2)


def processes(batch_size):
    return Pieces(batch_size, workers=2, use_multiprocessing=True, max_queue_size=4)


def one_for_all(batch_size):
    """The same object each time: what was stopped is started again."""
    return KEPT["threads"]


def processes_for_all(batch_size):
    return KEPT["processes"]


def prefetched(batch_size):
    return tf.data.Dataset.from_tensor_slices(data(32)).shuffle(32).batch(batch_size).prefetch(2)


def from_generator(batch_size):
    def draw():
        x, y = data(32)
        for start in range(0, 32, batch_size):
            yield x[start : start + batch_size], y[start : start + batch_size]

    signature = (tf.TensorSpec((None, 8)), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(draw, output_signature=signature).prefetch(2)


PIPELINE = prefetched(8)


def iterator_for_all(batch_size):
    """An iterator made anew of a pipeline that stays."""
    return iter(PIPELINE)


def endless():
    while True:
        yield data(8)


ENDLESS = endless()


def generator_for_all(batch_size):
    """The same generator each time: what it has still to give is its file's."""
    return ENDLESS


class Endless(Pieces):
    """Has no length: its epochs have as many batches as fit is told."""

    def __len__(self):
        raise TypeError("endless")

    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        return super().__getitem__(index % 4)


def endless_processes(batch_size):
    return Endless(batch_size, workers=2, use_multiprocessing=True, max_queue_size=2)


def buckets(batch_size):
    """Batches of samples that are alike, as they fill up, of data that are cached and repeated."""
    samples = tf.data.Dataset.from_tensor_slices(data(32)).cache().repeat()
    return samples.bucket_by_sequence_length(
        lambda x, y: tf.cast(y > 1, tf.int32), [1], [batch_size, batch_size]
    ).prefetch(tf.data.AUTOTUNE)


@pytest.mark.parametrize(
    "build_data",
    [
        endless_processes,
        buckets,
        threads,
        processes,
        one_for_all,
        pytest.param(processes_for_all, marks=pytest.mark.slow),
        prefetched,
        from_generator,
        iterator_for_all,
        generator_for_all,
    ],
)
def test_a_loader_serves_sessions_and_proofs_one_after_another(build_data):
    task = Task("task.py", build_model=lambda: eagerly(softmax_net()), build_data=build_data)
    backend = KerasBackend()
    for policy in ("float32", "mixed_bfloat16"):
        recipe = Recipe(policy, batch_size=8)
        session = backend.open(task, recipe, device="cpu", seed=0, report=lambda *_: None)
        assert session.time_steps(QUICK).samples_per_step == 8
        session.close()
        stream = batches(task, 8, 0, repeat=True, workers=True)
        taken = [next(stream) for _ in range(6)]
        stream.close()
        assert all(np.shape(x) == (8, 8) for x, _ in taken)
    stream = batches(task, 8, 0, repeat=True)
    assert len([next(stream) for _ in range(6)]) == 6
    stream.close()


def test_two_streams_of_one_dataset_go_on_side_by_side():
    task = Task(name="task.py", build_model=softmax_net, build_data=one_for_all)
    one, two = batches(task, 8, 0, repeat=True), batches(task, 8, 0, repeat=True, workers=True)
    next(one), next(two)
    two.close()
    assert np.shape(next(one)[0]) == (8, 8)
    one.close()
