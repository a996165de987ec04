"""Variables that Keras does not list: found, and put back when a float16 step is skipped."""

from __future__ import annotations

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.backends.keras.apply.layer_names import layer_units
from autoprec.backends.keras.apply.untracked_state import untracked_variables
from autoprec.core.recipe import LossScale, Recipe

layers = keras.layers
RECIPE = Recipe("mixed_float16", batch_size=8, loss_scale=LossScale(initial=64.0))
PLANTED = 2


class Average(layers.Layer):
    """Moves an average of its inputs, wherever that is kept, and passes them on."""

    def __init__(self, make, move):
        super().__init__()
        make(self)
        self.move = move

    def call(self, x):
        self.move(self, keras.ops.mean(keras.ops.cast(x, "float32"), axis=0))
        return x


def moved(old, new):
    return 0.9 * keras.ops.cast(old, "float32") + 0.1 * new


class Helper:
    """A plain object, as a callback or a tracker of statistics is."""

    def __init__(self, layer=None):
        self.owner = layer
        self.mean = keras.Variable(np.zeros(6, "float32"), trainable=False)

    def update(self, x):
        self.mean.assign(moved(self.mean, x))


class Slotted:
    __slots__ = ("means",)

    def __init__(self):
        self.means = {"inputs": (tf.Variable(tf.zeros(6)),)}


def enclosed(layer):
    mean = tf.Variable(tf.zeros(6))
    layer.update = lambda x: mean.assign(moved(mean, x))


def assign_row(layer, x):
    layer.table[:1].assign(x[None])
    layer.place.assign_add(1)


def with_table(layer):
    layer.table, layer.place = tf.Variable(tf.zeros((3, 6))), tf.Variable(0)


def with_hidden_norm(layer):
    layer.helper = types.SimpleNamespace(norm=layers.BatchNormalization())
    layer.helper.norm.build((None, 6))


KINDS = {
    "attribute": (
        lambda layer: setattr(layer, "mean", tf.Variable(tf.zeros(6))),
        lambda layer, x: layer.mean.assign(moved(layer.mean, x)),
        {"mean"},
    ),
    "assign_add": (
        lambda layer: setattr(layer, "means", [tf.Variable(tf.zeros(6))]),
        lambda layer, x: layer.means[0].assign_add(0.1 * (x - layer.means[0])),
        {"means[0]"},
    ),
    "scattered": (
        with_table,
        lambda layer, x: layer.table.scatter_nd_update([[1]], x[None]),
        {"table", "place"},
    ),
    "sliced": (with_table, assign_row, {"table", "place"}),
    "helper": (
        lambda layer: setattr(layer, "helper", Helper(layer)),
        lambda layer, x: layer.helper.update(x),
        {"helper.mean"},
    ),
    "slots": (
        lambda layer: setattr(layer, "slotted", Slotted()),
        lambda layer, x: layer.slotted.means["inputs"][0].assign(x),
        {"slotted.means['inputs'][0]"},
    ),
    "closure": (enclosed, lambda layer, x: layer.update(x), {"update.mean"}),
    "method": (
        lambda layer: setattr(layer, "update", Helper().update),
        lambda layer, x: layer.update(x),
        {"update.mean"},
    ),
    "partial": (
        lambda layer: setattr(layer, "update", functools.partial(Helper.update, Helper())),
        lambda layer, x: layer.update(x),
        {"update.mean"},
    ),
    "tf.Module": (
        lambda layer: setattr(layer, "helper", WithMean()),
        lambda layer, x: layer.helper.mean.assign(x),
        {"helper.mean"},
    ),
    "a layer that is not tracked": (
        with_hidden_norm,
        lambda layer, x: layer.helper.norm(x[None], training=True),
        {"helper.norm." + each for each in ("gamma", "beta", "moving_mean", "moving_variance")},
    ),
}


class WithMean(tf.Module):
    def __init__(self):
        super().__init__()
        self.mean = tf.Variable(tf.zeros(6))


class ScaledByMean(keras.losses.Loss):
    """Divides by a running mean of itself, kept in a variable or in a metric."""

    def __init__(self, metric):
        super().__init__(name="scaled")
        self.mean = keras.metrics.Mean() if metric else keras.Variable(1.0)

    def call(self, y, predicted):
        error = keras.ops.mean(keras.ops.square(y - keras.ops.cast(predicted, "float32")), axis=-1)
        if isinstance(self.mean, keras.metrics.Metric):
            self.mean.update_state(error)
            return error / (1.0 + self.mean.result())
        self.mean.assign(moved(self.mean, keras.ops.mean(error)))
        return error / (1.0 + self.mean)


def net(*inside):
    return keras.Sequential([layers.Input((6,)), *inside, layers.Dense(4), layers.Dense(1)])


def batches(count=5):
    draws = np.random.default_rng(0)
    for number in range(count):
        x = draws.normal(size=(8, 6)).astype("float32")
        if number == PLANTED:
            x[3] = np.inf
        yield x, draws.normal(size=(8, 1)).astype("float32")


def values(model):
    return {
        each.path: each.variable.numpy() for each in untracked_variables(model, layer_units(model))
    }


def train(model):
    """Train; return what Keras does not list before and after each step."""
    seen = [values(model)]
    with apply_profile(RECIPE, model=model) as precision:
        for x, y in batches():
            model.train_on_batch(x, y)
            seen.append(values(model))
        assert precision.skipped == 1
    return seen


def check_skipped_step_left_no_trace(seen):
    for path, value in seen[-1].items():
        assert np.isfinite(value).all(), path
        np.testing.assert_array_equal(seen[PLANTED][path], seen[PLANTED + 1][path], path)
    for number in (PLANTED, PLANTED + 2):
        before, after = seen[number - 1], seen[number]
        assert any(not np.array_equal(before[path], after[path]) for path in before)


#: One of each way of assigning; the others differ in where the variable is, which no trace changes.
COMPILED = ("attribute", "assign_add", "scattered", "sliced", "a layer that is not tracked")


@pytest.mark.parametrize(
    ("kind", "eager"),
    [
        *(pytest.param(kind, True, id=f"{kind}, eager") for kind in KINDS),
        *(pytest.param(kind, False, id=f"{kind}, compiled") for kind in COMPILED),
    ],
)
def test_what_a_layer_reaches_is_found_and_has_no_trace_of_a_skipped_step(kind, eager):
    make, move, paths = KINDS[kind]
    model = net(Average(make, move))
    model.compile("sgd", "mse", run_eagerly=eager)
    seen = train(model)
    assert set(seen[0]) == {f"average/{path}" for path in paths}
    check_skipped_step_left_no_trace(seen)


@pytest.mark.parametrize("metric", [False, True], ids=["variable", "metric"])
def test_what_a_loss_keeps_has_none_also_one_that_is_compiled_later(metric):
    model = net()
    for _ in range(2):
        model.compile("sgd", ScaledByMean(metric), metrics=["mae"])
        seen = train(model)
        names = {"mean.total", "mean.count"} if metric else {"mean"}
        assert set(seen[0]) == {f"loss.{name}" for name in names}
        check_skipped_step_left_no_trace(seen)
    with apply_profile(RECIPE, model=model) as precision:
        model.compile("sgd", [ScaledByMean(metric)])
        for x, y in batches():
            model.train_on_batch(x, y)
        assert precision.skipped == 1
        kept = values(model)
        assert all(path.startswith("loss[0].mean") for path in kept)
        assert all(np.isfinite(value).all() for value in kept.values())


def test_a_subclassed_model_that_makes_its_variable_when_it_is_called():
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(1)
            self.mean = None

        def call(self, x):
            if self.mean is None:
                with tf.init_scope():
                    self.mean = tf.Variable(tf.zeros(6))
            self.mean.assign(keras.ops.mean(keras.ops.cast(x, "float32"), axis=0))
            return self.head(x)

    model = Late()
    model.compile("sgd", "mse")
    with apply_profile(RECIPE, model=model) as precision:
        for x, y in batches(PLANTED + 1):
            model.train_on_batch(x, y)
        assert precision.skipped == 1
        assert np.isfinite(model.mean.numpy()).all()


def test_metrics_that_keras_resets_and_generators_keep_what_a_skipped_step_left():
    model = net(
        Average(
            lambda layer: setattr(layer, "random", tf.random.Generator.from_seed(1)),
            lambda layer, x: layer.random.normal((6,)),
        )
    )
    model.compile("sgd", "mse", metrics=["mae"])
    seen = train(model)
    (path,) = seen[0]
    assert "random" in path
    assert not np.array_equal(seen[PLANTED][path], seen[PLANTED + 1][path])
    with apply_profile(RECIPE, model=model):
        x, y = (np.concatenate(arrays) for arrays in zip(*batches(), strict=True))
        history = model.fit(x, y, 8, shuffle=False, verbose=0).history
    assert not np.isfinite(history["mae"]).any()


def test_restoring_takes_all_hooks_off():
    model = net(Average(*KINDS["attribute"][:2]))
    model.compile("sgd", "mse")
    before = dict(vars(model.layers[0].mean))
    with apply_profile(RECIPE, model=model):
        assert "scatter_add" in vars(model.layers[0].mean)
    assert vars(model.layers[0].mean) == before


@pytest.mark.parametrize("way", ["set_weights", "assign"])
def test_what_a_script_loads_before_an_eager_step_that_is_skipped_stays(way):
    """A forward pass begins a step, not a script that loads a checkpoint."""
    source, model = (net(layers.BatchNormalization()) for _ in range(2))
    source.layers[0].moving_mean.assign(np.arange(6.0))
    model.compile("sgd", "mse", run_eagerly=True)
    with apply_profile(RECIPE, model=model) as precision:
        model.train_on_batch(*next(batches()))
        if way == "set_weights":
            model.set_weights(source.get_weights())
        else:
            model.layers[0].moving_mean.assign(source.layers[0].moving_mean)
        *_, planted = batches(PLANTED + 1)
        model.train_on_batch(*planted)
        assert precision.skipped == 1
        np.testing.assert_array_equal(model.layers[0].moving_mean.numpy(), np.arange(6.0))
