"""fit, a custom train_step and a hand-written loop give the same losses, wrapped or not."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from tests.backends.keras.keras_models import OwnTrainStep, Subclassed, compiled, data

STEPS = 5


def batches():
    x, y = data(8 * STEPS)
    return [(x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]) for i in range(STEPS)]


def model_of(kind, initial=None, **compile_arguments):
    model = kind()
    model(batches()[0][0])
    compiled(model, **compile_arguments)
    if initial is not None:
        model.set_weights(initial)
    return model


class Losses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))


def by_fit(model):
    x, y = data(8 * STEPS)
    watch = Losses()
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[watch])
    return watch.losses


def by_loop(model, precision, graph=False):
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    optimizer = precision.optimizer if precision is not None else model.optimizer

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            scaled = precision.scale_loss(loss) if precision is not None else loss
        gradients = tape.gradient(scaled, model.trainable_variables)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        if precision is not None:
            return loss, precision.apply_gradients(pairs)
        optimizer.apply_gradients(pairs)
        return loss, True

    run = tf.function(step) if graph else step
    results = [run(x, y) for x, y in batches()]
    assert all(bool(changed) for _, changed in results)
    return [float(loss) for loss, _ in results]


RECIPES = {
    "float32": Recipe(),
    "mixed_bfloat16": Recipe(policy=Policy.MIXED_BFLOAT16),
    "mixed_float16": Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=2.0**8)),
}


@pytest.mark.parametrize("policy", RECIPES)
def test_the_three_loops_agree_step_by_step(policy):
    recipe = RECIPES[policy]
    initial = model_of(Subclassed).get_weights()
    runs = {}
    for name, kind in (("fit", Subclassed), ("train_step", OwnTrainStep)):
        model = model_of(kind, initial)
        KerasSurgeon().apply(recipe, model=model)
        runs[name] = by_fit(model)
    for name, graph in (("eager loop", False), ("tf.function loop", True)):
        model = model_of(Subclassed, initial)
        precision = KerasSurgeon().apply(recipe, model=model)
        runs[name] = by_loop(model, precision, graph)
        assert precision.steps == STEPS
        assert precision.skipped == 0
    for name, losses in runs.items():
        assert losses == pytest.approx(runs["fit"], rel=1e-2 if recipe.policy.mixed else 1e-6), name
    if policy == "float32":
        plain = by_fit(model_of(Subclassed, initial))
        assert plain == pytest.approx(runs["fit"], rel=1e-6)
        assert by_loop(model_of(Subclassed, initial), None) == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_model_changed_in_place_trains_as_one_built_under_the_global_policy(policy):
    def build():
        inputs = keras.Input((8,))
        x = keras.layers.Dense(16, activation="relu")(inputs)
        x = keras.layers.Dense(4)(x)
        return compiled(keras.Model(inputs, keras.layers.Activation("softmax", dtype="float32")(x)))

    keras.utils.set_random_seed(3)
    inside = build()
    KerasSurgeon().apply(RECIPES[policy], model=inside)
    with KerasSurgeon().apply(RECIPES[policy]) as precision:
        keras.utils.set_random_seed(3)
        outside = build()
        precision.attach(outside)
        assert by_fit(inside) == pytest.approx(by_fit(outside), rel=1e-6)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_accumulation_updates_once_for_several_batches_with_their_mean(policy):
    """With plain gradient descent: Adam's first steps are the same size for any gradient."""
    recipe = RECIPES[policy]
    scale = recipe.loss_scale
    accumulated = Recipe(policy=recipe.policy, loss_scale=scale, accumulation_steps=2)
    initial = model_of(Subclassed).get_weights()
    halves = model_of(Subclassed, initial, optimizer=keras.optimizers.SGD(0.5))
    precision = KerasSurgeon().apply(accumulated, model=halves)
    x, y = data(32)
    halves.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    whole = model_of(Subclassed, initial, optimizer=keras.optimizers.SGD(0.5))
    KerasSurgeon().apply(recipe, model=whole)
    whole.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert precision.steps == 2
    assert int(halves.optimizer.iterations) == 2, "schedules must not run ahead"
    tolerance = 3e-2 if recipe.policy.mixed else 1e-5
    for a, b, before in zip(halves.get_weights(), whole.get_weights(), initial, strict=True):
        moved = np.linalg.norm(b - before)
        assert moved > 0.01
        assert np.linalg.norm(a - b) <= tolerance * moved


def test_flush_ends_an_epoch_between_two_updates():
    model = model_of(Subclassed)
    precision = KerasSurgeon().apply(Recipe(accumulation_steps=4), model=model)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    answers = []
    for x, y in batches():
        with tf.GradientTape() as tape:
            loss = precision.scale_loss(loss_fn(y, model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        answers.append(
            precision.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        )
    assert answers == [False, False, False, True, False]
    assert precision.flush()
    assert not precision.flush()
    assert precision.steps == 2


def test_several_optimizers_have_their_own_scales():
    model = model_of(Subclassed)
    first, second = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
    precision = KerasSurgeon().apply(RECIPES["mixed_float16"], optimizers=(first, second))
    try:
        variables = [keras.Variable(1.0), keras.Variable(1.0)]
        for optimizer, variable in zip((first, second), variables, strict=True):
            with tf.GradientTape() as tape:
                loss = precision.scale_loss(variable.value * 2.0, optimizer)
            gradient = tape.gradient(loss, variable.value)
            assert precision.apply_gradients([(gradient, variable)], optimizer)
            assert float(variable.numpy()) == pytest.approx(0.8)
        bad = keras.ops.full((), float("inf"))
        assert not precision.apply_gradients([(bad, variables[0])], first)
        assert precision.skipped == 1
        assert [float(o.dynamic_scale.numpy()) for o in precision.optimizers] == [128.0, 256.0]
    finally:
        precision.restore()
    assert model.optimizer is not None


class Annealed(keras.Model):
    """Weights its second term by the number of updates so far, which it asks the optimizer for."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.norm, self.head = keras.layers.LayerNormalization(), keras.layers.Dense(1)

    def call(self, x):
        return self.head(self.norm(self.hidden(x)))

    def train_step(self, given):
        x, y = given
        with tf.GradientTape() as tape:
            updates = keras.ops.cast(self.optimizer.iterations, "float32")
            hidden = self.hidden(x)
            loss = keras.ops.mean(keras.ops.square(self.head(self.norm(hidden)) - y))
            loss += keras.ops.minimum(1.0, 0.1 * updates) * keras.ops.mean(keras.ops.square(hidden))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    "optimizer",
    [
        {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
        {"global_clipnorm": 0.05, "weight_decay": 0.1},
        {"learning_rate": keras.optimizers.schedules.CosineDecay(0.1, 8)},
    ],
    ids=["averaged", "clipped", "scheduled"],
)
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(batch_size=4, accumulation_steps=2),
        Recipe(batch_size=8, knobs={"steps_per_execution": 4}),
    ],
    ids=["accumulated", "executed by four"],
)
def test_what_counts_updates_counts_those_of_whole_batches(recipe, optimizer):
    """In the loss, in the optimizer and in its schedule."""
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    weights = []
    for given in (Recipe(batch_size=8), recipe):
        keras.utils.set_random_seed(0)
        model = Annealed()
        model(x)
        model.compile(keras.optimizers.AdamW(**{"learning_rate": 0.01, **optimizer}))
        with apply_profile(given, model=model) as precision:
            size = given.batch_size
            model.fit(x, x[:, :1], batch_size=size, shuffle=False, epochs=2, verbose=0)
            assert precision.steps == 16
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("roll_out", ["predict", "graph"])
def test_a_roll_out_has_the_log_probabilities_of_the_update_that_follows(roll_out):
    states = keras.Input((8,))
    hidden = keras.layers.Dense(64, "tanh")(keras.layers.Dense(64, "tanh")(states))
    actor, optimizer = keras.Model(states, keras.layers.Dense(4)(hidden)), keras.optimizers.Adam()
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    exact = actor(x)
    precision = apply_profile(Recipe(Policy.MIXED_BFLOAT16, 64), model=actor, optimizer=optimizer)

    @tf.function
    def update(states):
        with tf.GradientTape() as tape:
            logits = actor(states, training=True)
            loss = tf.reduce_mean(tf.square(logits))
        gradients = tape.gradient(precision.scale_loss(loss), actor.trainable_variables)
        precision.apply_gradients(zip(gradients, actor.trainable_variables, strict=True))
        return logits

    rolled = actor.predict(x, verbose=0) if roll_out == "predict" else tf.function(actor)(x)
    given = update(tf.constant(x))
    assert given.dtype == tf.float32
    np.testing.assert_array_equal(rolled, given)
    assert np.abs(given - exact).max() > 1e-4
    precision.restore()
