"""Traces compare a recipe with float32 from the same state, and read a backward pass's range."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.trace.batch_stream import batch_stream
from autoprec.backends.keras.trace.magnitudes import exponents_of
from autoprec.backends.keras.trace.trainee import KerasTrainee
from autoprec.backends.protocol import Task
from autoprec.backends.shared import checkpoint_budget
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import UsageError
from tests.backends.keras.keras_models import OwnTrainStep, compiled, data, softmax_net

FLOAT32 = Recipe(batch_size=8)
BF16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)


def with_dropout():
    return compiled(
        keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dropout(0.5),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(4, activation="softmax"),
            ]
        )
    )


def tracer(build_model=softmax_net, build_data=lambda n: data(64), **more):
    given = Task(name="task.py", build_model=build_model, build_data=build_data, **more)
    return KerasBackend().tracer(given, device="cpu", seed=0, report=lambda *_: None)


@pytest.mark.parametrize("model", [with_dropout, lambda: compiled(OwnTrainStep())])
def test_float32_is_its_own_shadow(model):
    traced = tracer(model)
    reference = traced.reference(batch_size=8, steps=4, checkpoints=(0, 3))
    assert reference.finite
    assert len(reference.losses) == 4
    assert reference.reproducible
    points = traced.shadow(recipe=FLOAT32)
    assert [point.step for point in points] == [0, 3]
    for point in points:
        assert point.loss == pytest.approx(point.reference, rel=1e-6)
        assert point.gradient_error < 1e-5
    again = traced.trajectory(recipe=FLOAT32, seed=0, steps=4)
    assert again.losses == pytest.approx(reference.losses, rel=1e-6)


def test_bfloat16_deviates_a_little_and_noise_is_its_measure():
    traced = tracer(with_dropout)
    traced.reference(batch_size=8, steps=3, checkpoints=(0, 2))
    shadow = traced.shadow(recipe=BF16)
    assert [point.step for point in shadow] == [0, 2]
    assert all(0 < point.gradient_error < 0.2 for point in shadow)
    noise = traced.noise(draws=2)
    assert [point.step for point in noise] == [0, 0, 2, 2]
    assert all(point.loss != point.reference for point in noise)
    assert len({point.loss for point in noise}) == 4


def test_late_losses_are_averaged_over_further_batches_at_the_same_weights():
    traced = tracer()
    traced.reference(batch_size=8, steps=62, checkpoints=(59, 60, 61))
    first, *late = traced.shadow(recipe=BF16)
    assert (first.mean_loss, first.mean_reference) == (None, None)
    stream = traced._stream(8, 0)
    model = softmax_net()
    for point, kept in zip(late, traced._checkpoints[1:], strict=True):
        model.set_weights(kept.state[: len(model.weights)])
        losses = []
        for index in range(32):
            x, y = stream.batch(index)
            losses.append(float(keras.ops.mean(model.compute_loss(x, y, model(x)))))
        assert point.mean_reference == pytest.approx(np.mean(losses), rel=1e-5)
        assert point.mean_loss == pytest.approx(point.mean_reference, rel=1e-2)
        assert point.mean_loss != point.mean_reference


def test_noise_and_seeds_change_a_trajectory_and_repeats_do_not():
    traced = tracer(with_dropout)
    first, same, noisy, other = (
        traced.trajectory(recipe=FLOAT32, seed=seed, steps=3, noisy=noise).losses
        for seed, noise in ((1, False), (1, False), (1, True), (2, False))
    )
    assert first == same
    assert first != noisy
    assert first == pytest.approx(noisy, rel=0.05)
    assert first != other


def test_float16_trajectories_report_skips_and_scales():
    recipe = Recipe(
        policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=2.0**40)
    )
    run = tracer().trajectory(recipe=recipe, seed=0, steps=3)
    assert run.skipped == (0, 1, 2)
    assert run.scales == (2.0**39, 2.0**38, 2.0**37)
    tuned = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=2.0**10))
    traced = tracer()
    traced.reference(batch_size=8, steps=1, checkpoints=(0,))
    (point,) = traced.shadow(recipe=tuned)
    assert point.gradient_error < 0.02


@pytest.mark.parametrize(("factor", "fits"), [(1000.0, True), (100_000.0, False)])
def test_float16_shadows_say_how_large_the_forward_pass_gets(factor, fits):
    def model():
        up = keras.layers.Lambda(lambda x: x * 100.0 * (factor / 100.0))
        scaled = [up, keras.layers.Lambda(lambda x: x * (1.0 / factor))]
        last = keras.layers.Dense(4, activation="softmax")
        return compiled(keras.Sequential([keras.layers.Input((8,)), *scaled, last]))

    ones = np.ones((64, 8), "float32"), np.zeros(64, "int32")
    traced = tracer(model, build_data=lambda n: ones)
    traced.reference(batch_size=8, steps=2, checkpoints=(0, 1))
    float16 = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale(initial=2.0**10))
    points = traced.shadow(recipe=float16)
    assert [point.step for point in points] == [0, 1]
    for point in points:
        assert point.overflowed is not fits
        assert point.largest == (factor if fits else None)
    assert all(point.largest is None for point in traced.shadow(recipe=BF16))


def test_a_trajectory_with_accumulation_averages_its_micro_batches():
    traced = tracer()
    whole = traced.trajectory(recipe=Recipe(batch_size=16), seed=0, steps=3)
    halves = traced.trajectory(recipe=Recipe(batch_size=8, accumulation_steps=2), seed=0, steps=3)
    assert halves.losses == pytest.approx(whole.losses, rel=1e-5)


def test_a_run_ends_when_its_time_is_up_and_evaluate_is_asked():
    traced = tracer(evaluate=lambda model: 0.5)
    run = traced.trajectory(recipe=FLOAT32, seed=0, steps=1000, seconds=0.5)
    assert 0 < len(run.losses) < 1000
    assert run.metric == 0.5


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


def test_comparing_needs_a_reference():
    with pytest.raises(UsageError, match="reference"):
        tracer().shadow(recipe=BF16)


def test_exponents_are_those_of_numpy():
    assert exponents_of(np.array([0.0, 4.0, -3.0, np.inf, 2.0**-30])).tolist() == [2, 1, -30]


def regression(factor):
    """One linear layer whose upstream gradient is known: d loss / d y = factor / samples."""

    def model():
        net = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        return compiled(net, loss=lambda y, p: keras.ops.mean(p) * factor)

    return model


@pytest.mark.parametrize("exponent", [-20, 0, 12])
def test_the_largest_backward_magnitude_is_found_exactly(exponent):
    inputs = np.full((8, 2), 0.25, "float32")
    traced = tracer(regression(2.0**exponent), lambda n: [(inputs, np.zeros((8, 1), "float32"))])
    found = traced.backward_exponents(recipe=BF16, batches=2)
    assert found.largest == exponent - 2  # the kernel's gradient: 8 x (factor / 8) x 0.25
    assert found.counts == {str(exponent - 2): 1.0}
    assert found.batches == 2
    assert found.finite


def amplified(loop=1.0, layer=1.0):
    """A recurrent net whose gradients are so many times as large in its loop, or in a layer."""

    class Cell(keras.layers.SimpleRNNCell):
        def call(self, inputs, states, training=False):
            output, states = super().call(inputs, states, training=training)
            return (output / loop) * loop, states

    class Amplified(keras.layers.Layer):
        def call(self, x):
            return (x / layer) * layer

    return lambda: compiled(
        keras.Sequential(
            [
                keras.layers.Input((3, 4)),
                keras.layers.RNN(Cell(4), name="loop"),
                Amplified(name="layer"),
                keras.layers.Dense(4, activation="softmax", name="dense"),
            ]
        )
    )


@pytest.mark.parametrize("where", ["loop", "layer"])
def test_large_gradients_inside_functional_code_and_loops_are_seen(where):
    inputs = np.random.default_rng(0).normal(size=(8, 3, 4)).astype("float32")

    def seen(factor):
        model = amplified(**{where: factor})
        traced = tracer(model, lambda n: [(inputs, np.zeros(8, "int32"))])
        found = traced.backward_exponents(recipe=BF16, batches=1).largest
        return found, {unit.path: unit for unit in traced.unit_magnitudes(recipe=BF16)}

    small, units = seen(2.0**6)
    large, larger = seen(2.0**12)
    assert (small, large) == (units[where].backward_largest, larger[where].backward_largest)
    assert {"loop", "layer", "dense"} <= set(units)
    for path, unit in units.items():
        grown = 6 if path == where else 0
        assert larger[path].backward_largest == unit.backward_largest + grown
        assert larger[path].forward_largest == unit.forward_largest
        assert (unit.underflow, larger[path].underflow) == (0.0, 0.0)
    assert units["dense"].forward_largest < 0, "the exponent of a chance below 1"
    assert units["dense"].backward_largest < 0


def test_an_infinite_backward_pass_is_reported():
    class Infinite(keras.layers.Layer):
        def call(self, x):
            return keras.ops.sqrt(x * 0.0)

    def model():
        net = keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.Dense(4), Infinite(), keras.layers.Dense(1)]
        )
        return compiled(net, loss="mse")

    build = lambda n: [(np.ones((8, 8), "float32"), np.ones((8, 1), "float32"))]  # noqa: E731
    assert not tracer(model, build).backward_exponents(recipe=BF16, batches=1).finite


def normal_data(batch_size):
    """Batches that are drawn from numpy's global generator, as many task files do."""
    for _ in range(8):
        yield (
            np.random.normal(size=(batch_size, 8)).astype("float32"),
            np.zeros(batch_size, "int32"),
        )


def test_a_tracers_seed_changes_weights_and_data():
    def losses(build_data, seed):
        given = Task(name="task.py", build_model=softmax_net, build_data=build_data)
        traced = KerasBackend().tracer(given, device="cpu", seed=seed, report=lambda *_: None)
        run = traced.reference(batch_size=8, steps=2, checkpoints=(0,))
        (point,) = traced.shadow(recipe=FLOAT32)
        assert point.loss == pytest.approx(run.losses[0], rel=1e-6)
        return run.losses

    same_data = lambda n: data(64)  # noqa: E731
    assert losses(same_data, 0) == losses(same_data, 0)
    assert losses(same_data, 0) != losses(same_data, 1000)  # other weights
    task = Task(name="task.py", build_model=softmax_net, build_data=normal_data)
    streams = [batch_stream(task, 8, seed) for seed in (0, 0, 1000)]
    first, again, other = (np.asarray(stream.batch(0)[0]) for stream in streams)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    traced = KerasBackend().tracer(task, device="cpu", seed=1000, report=lambda *_: None)
    assert np.array_equal(np.asarray(traced._stream(8, 0).batch(0)[0]), other)


def test_a_large_model_keeps_the_checkpoints_that_there_is_memory_for(monkeypatch):
    traced = tracer()
    traced.reference(batch_size=8, steps=4, checkpoints=(0, 1, 3))
    assert [point.step for point in traced.shadow(recipe=FLOAT32)] == [0, 1, 3]
    size = sum(value.nbytes for value in traced._checkpoints[0].state)
    monkeypatch.setattr(checkpoint_budget, "MAX_CHECKPOINT_BYTES", 4 * size)
    traced.reference(batch_size=8, steps=4, checkpoints=(0, 1, 3))
    assert [point.step for point in traced.shadow(recipe=FLOAT32)] == [0, 3]


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


def test_no_model_is_kept_when_a_trace_ends_or_fails(monkeypatch):
    closed = []
    close = KerasTrainee.close
    monkeypatch.setattr(KerasTrainee, "close", lambda self: (close(self), closed.append(self)))
    built = []
    build = KerasTrainee.__init__
    monkeypatch.setattr(
        KerasTrainee, "__init__", lambda self, *args: (built.append(self), build(self, *args))[1]
    )

    def fail(model):
        raise RuntimeError("the user's own")

    traced = tracer(evaluate=fail)
    with pytest.raises(RuntimeError, match="own"):
        traced.reference(batch_size=8, steps=2, checkpoints=(0, 1))
    assert built == closed
    traced.noise(draws=1)
    traced.shadow(recipe=BF16)
    traced.backward_exponents(recipe=BF16, batches=1)
    traced.unit_magnitudes(recipe=BF16)
    assert built == closed
    assert len(built) == 6  # float32's answers first


def test_a_model_that_is_built_differently_each_time_still_starts_the_same():
    random = np.random.default_rng(0)  # of the task file's own: no seed reaches it

    def build():
        model = softmax_net()
        model.set_weights([random.normal(size=w.shape) for w in model.get_weights()])
        return model

    traced = tracer(build)
    first, again, other = (
        traced.trajectory(recipe=FLOAT32, seed=seed, steps=3).losses for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_a_layer_that_models_share_starts_each_run_untrained():
    shared = keras.layers.Dense(8, activation="tanh")

    def build():
        layers = [keras.layers.Input((8,)), shared, keras.layers.Dense(4, activation="softmax")]
        return compiled(keras.Sequential(layers))

    traced = tracer(build)
    losses = [traced.trajectory(recipe=FLOAT32, seed=0, steps=3).losses for _ in range(2)]
    assert losses[0] == losses[1]


def test_scales_are_told_where_a_model_holds_its_optimizers_itself():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)
            self.own = keras.optimizers.SGD(0.01)

        def call(self, x):
            return self.dense(x)

        def train_step(self, batch):
            import tensorflow as tf

            x, _ = batch
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(keras.ops.cast(self(x), "float32")))
                scaled = self.own.scale_loss(loss)
            variables = self.trainable_variables
            self.own.apply(tape.gradient(scaled, variables), variables)
            return {"loss": loss}

    def build():
        model = Own()
        model.compile(optimizer=None, loss="sparse_categorical_crossentropy")
        return model

    recipe = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale(initial=2.0**10))
    run = tracer(build).trajectory(recipe=recipe, seed=0, steps=2)
    assert run.scales == (2.0**10, 2.0**10)


@pytest.mark.parametrize("exponent", [-12, 0, 12])
def test_float16_shadows_say_how_large_the_backward_pass_gets_without_its_scale(exponent):
    inputs = np.full((8, 2), 0.25, "float32")
    build = lambda n: [(inputs, np.zeros((8, 1), "float32"))]  # noqa: E731
    traced = tracer(regression(2.0**exponent), build)
    traced.reference(batch_size=8, steps=2, checkpoints=(0, 1))
    for scale in (-4.0, 2.0):
        initial = LossScale(initial=2.0**scale)
        for point in traced.shadow(recipe=Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=initial)):
            assert point.backward == 2.0 ** (exponent - 2)  # as in the bfloat16 pass below
    beyond = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale(initial=2.0**40))
    if exponent > -12:
        assert [point.backward for point in traced.shadow(recipe=beyond)] == [None, None]
    assert all(point.backward is None for point in traced.shadow(recipe=BF16))


def test_magnitudes_are_read_under_the_same_dropout_as_losses():
    def model():
        whole = keras.layers.Dense(8, use_bias=False, kernel_initializer="identity")
        dropped = keras.layers.Dropout(0.5)
        last = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        net = keras.Sequential([keras.layers.Input((8,)), whole, dropped, last])
        net.compile(keras.optimizers.SGD(0.0), loss=lambda y, p: keras.ops.mean(p))
        return net

    powers = 2.0 ** np.arange(8, dtype="float32")[None]
    traced = tracer(model, lambda n: [(powers, np.zeros((1, 1), "float32"))])
    steps = range(5)
    traced.reference(batch_size=1, steps=len(steps), checkpoints=tuple(steps))
    float16 = Recipe(Policy.MIXED_FLOAT16, 1, loss_scale=LossScale(initial=1.0))
    points = traced.shadow(recipe=float16)
    assert len({point.reference for point in points}) > 2
    for point in points:  # the sum of what is left, or else the largest of what went in
        assert point.loss == point.reference
        assert point.largest == max(point.reference, 128.0)


def test_batches_of_another_size_are_forgotten():
    traced = tracer()
    for size in (8, 4):
        traced.reference(batch_size=size, steps=1, checkpoints=())
        assert list(traced._streams) == [(size, 0)]
