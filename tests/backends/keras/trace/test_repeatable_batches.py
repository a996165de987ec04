"""A Keras task's batches are the same every time, whatever data it has."""

from __future__ import annotations

import numpy as np

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.trace.tracer import batch_stream
from autoprec.backends.protocol import Task
from autoprec.core.recipe import Recipe
from tests.backends.keras.keras_models import data, softmax_net

FLOAT32 = Recipe(batch_size=8)


def tracer(build_model=softmax_net, build_data=lambda n: data(64), **more):
    given = Task(name="task.py", build_model=build_model, build_data=build_data, **more)
    return KerasBackend().tracer(given, device="cpu", seed=0, report=lambda *_: None)


def normal_data(batch_size):
    """Batches that are drawn from numpy's global generator, as many task files do."""
    for _ in range(8):
        yield (
            np.random.normal(size=(batch_size, 8)).astype("float32"),
            np.zeros(batch_size, "int32"),
        )


def test_a_tracers_seed_changes_data():
    task = Task(name="task.py", build_model=softmax_net, build_data=normal_data)
    streams = [batch_stream(task, 8, seed) for seed in (0, 0, 1000)]
    first, again, other = (np.asarray(stream.batch(0)[0]) for stream in streams)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    traced = KerasBackend().tracer(task, device="cpu", seed=1000, report=lambda *_: None)
    assert np.array_equal(np.asarray(traced._stream(8, 0).batch(0)[0]), other)


def test_a_buffer_that_the_data_use_again_is_copied():
    buffer = np.zeros((8, 8), "float32")

    def reused(batch_size):
        for index in range(4):
            buffer[:] = index
            yield buffer, np.zeros(batch_size, "int32")

    stream = batch_stream(Task(name="task.py", build_model=softmax_net, build_data=reused), 8, 0)
    for index in (0, 1, 2, 3, 0, 2):
        assert np.asarray(stream.batch(index)[0]).max() == index


def test_batches_beyond_the_budget_are_compared_when_they_are_drawn_again():
    epochs = iter(range(1000))

    def drifting(batch_size):
        epoch = next(epochs)
        for index in range(4):  # the first batch is the same every time
            yield np.full((batch_size, 8), index * (1 + epoch), "float32"), np.zeros(batch_size)

    task = Task(name="task.py", build_model=softmax_net, build_data=drifting)
    stream = batch_stream(task, 8, 0, keep_bytes=1)
    assert stream.reproducible
    pinned = np.asarray(stream.batch(2, pin=True)[0])
    stream.batch(1)
    assert not stream.reproducible
    assert np.array_equal(np.asarray(stream.batch(2)[0]), pinned)
    assert np.asarray(stream.batch(1)[0]).max() == 0  # the kept one, in a cycle


def test_data_that_do_not_repeat_are_kept_and_replayed():
    draws = iter(range(1000))

    def changing(batch_size):
        random = np.random.default_rng(next(draws))
        return [
            (random.normal(size=(batch_size, 8)).astype("float32"), np.zeros(batch_size, "int32"))
        ]

    traced = tracer(build_data=changing)
    first = traced.reference(batch_size=8, steps=3, checkpoints=(0,))
    assert not first.reproducible
    assert traced.trajectory(recipe=FLOAT32, seed=0, steps=3).losses == first.losses
