"""A skipped float16 step leaves no trace in what layers keep: statistics, averages, states."""

from __future__ import annotations

import gc
import itertools
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.core.recipe import LossScale, Recipe

layers = keras.layers
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
PLANTED = 2


def net():
    return keras.Sequential(
        [
            layers.Input((6, 6, 1)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


@keras.saving.register_keras_serializable(package="tests")
class RunningMean(layers.Layer):
    """Keeps an average of its inputs of its own, by `assign_add`, and only now and then."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), trainable=False, name="mean")
        self.count = self.add_weight(shape=(), trainable=False, dtype="int32", name="count")

    def call(self, x):
        self.count.assign_add(1)
        mean = keras.ops.mean(keras.ops.cast(x, "float32"), axis=0)

        def move():
            self.mean.assign_add(0.5 * (mean - self.mean))

        keras.ops.cond(self.count > 0, move, lambda: None)
        return x - keras.ops.cast(self.mean, x.dtype)


class Averaged(keras.Model):
    """Subclassed; its layers are made when it is built."""

    def build(self, shape):
        self.hidden = layers.Dense(8)
        self.average = RunningMean()
        self.head = layers.Dense(3)
        for layer, features in ((self.hidden, 36), (self.average, 8), (self.head, 8)):
            layer.build((shape[0], features))

    def call(self, x, training=None):
        return self.head(self.average(self.hidden(keras.ops.reshape(x, (-1, 36)))))


@keras.saving.register_keras_serializable(package="tests")
class Queue(layers.Layer):
    """Keeps the last means of its inputs, and where the next one goes."""

    def build(self, shape):
        self.queue = self.add_weight(shape=(4, shape[-1]), trainable=False, name="queue")
        self.place = self.add_weight(shape=(), trainable=False, dtype="int32", name="place")
        self.full = self.add_weight(shape=(), trainable=False, dtype="bool", name="full")

    def call(self, x, training=False):
        if training:
            mean = keras.ops.mean(keras.ops.cast(x, "float32"), axis=0)
            row = keras.ops.one_hot(self.place, 4)[:, None]
            self.queue.assign((1.0 - row) * keras.ops.cast(self.queue, "float32") + row * mean)
            self.place.assign((self.place + 1) % 4)
            self.full.assign(keras.ops.logical_or(self.full, self.place == 0))
        return x


def queued():
    return keras.Sequential(
        [layers.Input((6, 6, 1)), layers.Flatten(), layers.Dense(8), Queue(), layers.Dense(3)]
    )


def spectral():
    """Assigns a weight that trains in every forward pass."""
    normalized = layers.SpectralNormalization(layers.Conv2D(4, 3))
    return keras.Sequential(
        [layers.Input((6, 6, 1)), normalized, layers.Flatten(), layers.Dense(3)]
    )


def stateful():
    inputs = keras.Input(batch_shape=(8, 6, 6, 1))
    hidden = layers.LSTM(8, stateful=True)(layers.Reshape((6, 6))(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(8)(hidden)))


def batches(count=6, planted=(PLANTED,)):
    """Yield batches of which some hold one value that float16 does not."""
    draws = np.random.default_rng(0)
    for number in range(count):
        x = draws.normal(size=(8, 6, 6, 1)).astype("float32")
        if number in planted:
            x[3, 2:4, 2:4] = 3e6
        yield x, draws.integers(0, 3, 8).astype("int32")


def kept(model):
    """Return statistics, averages and counts, and the states of recurrent layers."""
    states = [s for layer in model.layers for s in getattr(layer, "states", None) or ()]
    return [v.numpy() for v in (*model.non_trainable_variables, *states)]


def recipe(**more):
    return Recipe("mixed_float16", batch_size=8, loss_scale=LossScale(initial=64.0), **more)


def by_train_on_batch(model, optimizer):
    optimizer.build(model.trainable_variables)
    return model.train_on_batch


def by_loop(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(CROSS_ENTROPY(y, model(x, training=True)))
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def by_function(model, optimizer):
    optimizer.build(model.trainable_variables)
    return tf.function(by_loop(model, optimizer))


def by_gradient_function(model, optimizer, jit_compile=False):
    """Loss and gradient in a compiled function, the update outside."""

    def gradient(x, y):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(CROSS_ENTROPY(y, model(x, training=True)))
        return tape.gradient(scaled, model.trainable_variables)

    optimizer.build(model.trainable_variables)
    compiled = tf.function(gradient, jit_compile=jit_compile)

    def step(x, y):
        optimizer.apply_gradients(zip(compiled(x, y), model.trainable_variables, strict=True))

    return step


def by_xla_function(model, optimizer):
    return by_gradient_function(model, optimizer, jit_compile=True)


def by_two_functions(model, optimizer):
    """The forward pass in one compiled function, the update in another."""
    optimizer.build(model.trainable_variables)
    forward = tf.function(lambda x: model(x, training=True))
    update = tf.function(
        lambda gradients: optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
    )

    def step(x, y):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(CROSS_ENTROPY(y, forward(x)))
        update(tape.gradient(scaled, model.trainable_variables))

    return step


def train(model, way, skips=1, **more):
    """Train; return the state before and after the planted step, and the precision."""
    with apply_profile(recipe(**more), model=model) as precision:
        step = way(model, precision.optimizer)
        before = after = None
        for number, (x, y) in enumerate(batches()):
            before = kept(model) if number == PLANTED else before
            step(tf.constant(x), tf.constant(y))
            after = kept(model) if number == PLANTED else after
        assert precision.skipped == skips
        assert all(np.isfinite(values).all() for values in kept(model))
        assert all(np.isfinite(v.numpy()).all() for v in precision.optimizer.variables)
        assert np.isfinite(model(next(batches())[0], training=False)).all()
    return before, after


@pytest.mark.parametrize(
    "way",
    [
        *(by_train_on_batch, by_loop, by_function),
        *(by_two_functions, by_gradient_function, by_xla_function),
    ],
)
def test_batchnorm_is_as_it_was_before_a_skipped_step_of_which_nothing_is_held(way):
    def used():
        model = net()
        model.compile("adam", CROSS_ENTROPY)
        before, after = train(model, way)
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(old, new)
        return weakref.ref(model.layers[1].moving_mean)

    mean = used()
    gc.collect()
    assert mean() is None


@pytest.mark.parametrize(
    "arguments", [{"jit_compile": True}, {"run_eagerly": True}], ids=["jit", "eager"]
)
def test_it_is_however_the_step_is_compiled(arguments):
    model = net()
    model.compile("adam", CROSS_ENTROPY, **arguments)
    before, after = train(model, by_train_on_batch)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("make", [Averaged, queued, stateful])
@pytest.mark.parametrize("way", [by_train_on_batch, by_loop, by_function])
def test_state_of_any_layer_is(make, way):
    model = make()
    model.compile(keras.optimizers.SGD(0.01, use_ema=True), CROSS_ENTROPY)
    if not model.built:
        model.build((None, 6, 6, 1))
    before, after = train(model, way)
    assert before
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("way", [by_train_on_batch, by_function])
def test_weights_that_the_forward_pass_assigns_are(way):
    model = spectral()
    model.compile("sgd", CROSS_ENTROPY)
    weights = []
    kernel = model.layers[0].layer.kernel
    with apply_profile(recipe(), model=model) as precision:
        step = way(model, precision.optimizer)
        for x, y in batches():
            step(tf.constant(x), tf.constant(y))
            weights.append(kernel.numpy())
        assert precision.skipped == 1
    moved = [np.abs(new - old).max() for old, new in itertools.pairwise(weights)]
    assert moved[PLANTED - 1] == 0
    assert min(moved[PLANTED:]) > 0


def test_no_copy_is_made_where_the_step_makes_its_update():
    model = net()
    model.compile("adam", CROSS_ENTROPY)
    with apply_profile(recipe(), model=model) as precision:
        precision.optimizer.build(model.trainable_variables)
        known = {id(v) for v in alive(tf.Variable)}
        for x, y in batches():
            model.train_on_batch(x, y)
        gc.collect()
        new = [v for v in alive(tf.Variable) if id(v) not in known]
        assert not any(v.shape == (4,) and not v.trainable for v in new)


def alive(kind):
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def test_the_average_of_the_weights_is_not_moved_by_a_skipped_step():
    model = net()
    model.compile(keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5), CROSS_ENTROPY)
    with apply_profile(recipe(), model=model) as precision:
        (first, *_, planted) = batches(PLANTED + 1)
        model.train_on_batch(*first)
        inner = precision.optimizer.inner_optimizer
        averages = [v.numpy() for v in inner._model_variables_moving_average]
        model.train_on_batch(*planted)
        assert precision.skipped == 1
        for old, new in zip(averages, inner._model_variables_moving_average, strict=True):
            np.testing.assert_array_equal(old, new.numpy())


@pytest.mark.parametrize("accumulation", ["Keras's", "the recipe's"])
def test_a_skipped_micro_batch_leaves_no_trace(accumulation):
    model = net()
    steps = 2 if accumulation == "Keras's" else None
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=steps), CROSS_ENTROPY)
    before, after = train(model, by_train_on_batch, accumulation_steps=1 if steps else 2)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_several_steps_per_execution_leave_none():
    model = net()
    model.compile("adam", CROSS_ENTROPY, steps_per_execution=3)
    x, y = (np.concatenate(arrays) for arrays in zip(*batches(), strict=True))
    twin = net()
    twin.compile("adam", CROSS_ENTROPY)
    twin.set_weights(model.get_weights())
    with apply_profile(recipe(), model=model) as precision:
        model.fit(x, y, 8, shuffle=False, verbose=0)
        assert precision.skipped == 1
    with apply_profile(recipe(), model=twin):
        for number, (inputs, targets) in enumerate(batches()):
            if number != PLANTED:
                twin.train_on_batch(inputs, targets)
    for ours, theirs in zip(kept(model), kept(twin), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


class TwoOptimizers(keras.Model):
    """Two halves, each with its optimizer, from one forward pass."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential(
            [layers.Flatten(), layers.Dense(8), layers.BatchNormalization()]
        )
        self.head = layers.Dense(3)

    def compile(self, body, head):
        super().compile(loss=CROSS_ENTROPY)
        self.body_optimizer, self.head_optimizer = body, head

    def call(self, x, training=None):
        return self.head(self.body(x, training=training))

    def train_step(self, given):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(given)
        with tf.GradientTape(persistent=True) as tape:
            loss = CROSS_ENTROPY(y, self(x, training=True))
            one = self.head_optimizer.scale_loss(loss)
            two = self.body_optimizer.scale_loss(loss)
        for scaled, part, optimizer in (
            (one, self.head, self.head_optimizer),
            (two, self.body, self.body_optimizer),
        ):
            weights = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        return {"loss": loss}


def test_two_optimizers_put_back_what_the_step_of_either_broke():
    model = TwoOptimizers()
    model.compile(keras.optimizers.Adam(), keras.optimizers.SGD(0.01))
    before, after = train(model, by_train_on_batch, skips=2)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_weights_loaded_before_a_first_step_that_overflows_stay():
    source, model = net(), net()
    source.layers[1].moving_mean.assign([1.0, 2.0, 3.0, 4.0])
    model.compile("adam", CROSS_ENTROPY)
    with apply_profile(recipe(), model=model) as precision:
        model.set_weights(source.get_weights())
        for _ in range(2):
            model.train_on_batch(*next(batches(planted=(0,))))
        assert precision.skipped == 2
        np.testing.assert_array_equal(model.layers[1].moving_mean.numpy(), [1.0, 2.0, 3.0, 4.0])


def test_what_a_script_assigns_itself_is_assigned_and_restoring_takes_the_hooks_off():
    model = net()
    model.compile("adam", CROSS_ENTROPY)
    mean = model.layers[1].moving_mean
    with apply_profile(recipe(), model=model):
        mean.assign(np.full(4, np.inf))
        assert np.isinf(mean.numpy()).all()
    assert "assign" not in vars(mean)
    with apply_profile(Recipe("mixed_bfloat16", batch_size=8), model=model):
        assert "assign" not in vars(mean)


def test_a_model_under_the_global_form_is_followed():
    with apply_profile(recipe()) as precision:
        model = net()
        optimizer = precision.wrap(keras.optimizers.Adam())
        step = by_loop(model, optimizer)
        for x, y in batches():
            step(tf.constant(x), tf.constant(y))
        assert precision.skipped == 1
        assert all(np.isfinite(values).all() for values in kept(model))
