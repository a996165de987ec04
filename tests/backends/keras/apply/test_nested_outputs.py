"""Outputs of any structure are float32; what cannot be rebuilt is named once."""

from __future__ import annotations

import functools
import itertools
import types
import warnings
from collections import OrderedDict, deque, namedtuple
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import AutoprecWarning

Pair = namedtuple("Pair", "logits hidden")


@dataclass
class Output:
    logits: Any
    step: int = 3

    def given(self):
        return self.logits


@dataclass(frozen=True)
class Frozen:
    logits: Any
    hidden: Any = None
    computed: Any = field(default=None, init=False)


def shifted(x, by=0.0):
    return x + by


class Plain:
    def __init__(self, logits):
        self._logits = logits
        self.me = self

    @property
    def logits(self):
        return self._logits


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits):
        self.logits = logits


class Sealed:
    """Cannot be copied."""

    def __init__(self, logits):
        self.logits = logits

    def __copy__(self):
        raise TypeError("one of a kind")


class Distribution:
    """Knows its dtype, as TensorFlow Probability's distributions do."""

    def __init__(self, logits):
        self.logits = logits
        self.dtype = logits.dtype

    def log_prob(self):
        return keras.ops.log_softmax(keras.ops.cast(self.logits, self.dtype))


KINDS = {
    "dataclass": Output,
    "frozen": lambda z: Frozen(z, [z, {"a": z}]),
    "namespace": lambda z: types.SimpleNamespace(logits=z),
    "namedtuple": lambda z: Pair(z, None),
    "plain": Plain,
    "slots": Slotted,
    "nested dicts": lambda z: {"a": OrderedDict(logits=z)},
    "objects in a list": lambda z: [Output(Output(z))],
    "deque": lambda z: deque([z], maxlen=3),
    "generator": lambda z: (Output(each) for each in [z, z]),
    "iterator": lambda z: iter([z, {"a": z}]),
    "zip": lambda z: zip([z], [Output(z)], strict=True),
    "map": lambda z: map(Output, [z]),
    "enumerated": lambda z: enumerate((z,)),
    "chained": lambda z: itertools.chain([z], [z]),
    "values": lambda z: {"a": z, "b": 1}.values(),
    "items": lambda z: {"a": [z]}.items(),
    "read-only": lambda z: types.MappingProxyType({"a": z}),
    "partial": lambda z: functools.partial(shifted, z, by=z),
    "method": lambda z: Output(z).given,
}


class Net(keras.Model):
    """Its own code ends in 16 bits, whatever its last layer gives."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.head = keras.layers.Dense(4)

    def build(self, shape):
        self.hidden.build((shape[0], 6))
        self.head.build((shape[0], 8))

    def call(self, x):
        return self.make(keras.ops.cast(self.head(self.hidden(x)), self.compute_dtype))


def tensors(value):
    """List the tensors of an output, in this test's own way."""
    if tf.is_tensor(value):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if callable(value):
        return [value()]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [t for each in value for t in tensors(each)]
    if isinstance(value, Frozen):
        return tensors([value.logits, value.hidden])
    return tensors(value.logits) if hasattr(value, "logits") else []


X = np.random.default_rng(0).normal(size=(5, 6)).astype("float32")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_any_structure_are_float32(kind, policy):
    model = Net(KINDS[kind])
    exact = tensors(model(X))
    plain = type(model(X))
    if issubclass(plain, Iterator):
        plain = types.GeneratorType  # gone through as the user does
    with apply_profile(Recipe(policy, batch_size=5), model=model):
        given = model(X)
        assert type(given) is plain
        found = tensors(given)
        traced = []
        tf.function(lambda x: traced.extend(tensors(model(x))))(tf.constant(X))
    assert len(found) == len(exact) > 0
    assert {t.dtype for t in (*found, *traced)} == {tf.float32}
    for ours, theirs in zip(found, exact, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.05)


def test_the_objects_that_the_model_makes_stay_its_own():
    made = []

    def make(z):
        made.append(Output(z))
        return made[-1]

    model = Net(make)
    model(X)
    with apply_profile(Recipe("mixed_bfloat16", batch_size=5), model=model):
        given = model(X)
        assert given is not made[-1]
        assert given.step == 3
        assert made[-1].logits.dtype == "bfloat16"


def test_an_object_without_low_precision_is_returned_itself():
    kept = types.SimpleNamespace(logits=tf.ones(3), names=["a"], net=keras.layers.Dense(2))
    model = Net(lambda z: (z, kept))
    model(X)
    with apply_profile(Recipe("mixed_bfloat16", batch_size=5), model=model):
        assert model(X)[1] is kept


@pytest.mark.parametrize("shapes", ["alike", "ragged"])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_tensor_array_is_float32_and_the_models_own_stays_readable(shapes, traced):
    made = []

    def make(z):
        given = tf.TensorArray(z.dtype, size=2, infer_shape=shapes == "alike")
        given = given.write(0, z).write(1, z if shapes == "alike" else z[:2])
        made.append(given)
        return given

    model = Net(make)
    model(X)

    def total(x):
        given, own = model(x), made[-1]
        assert given.dtype == "float32"
        assert own.dtype == "bfloat16"
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x).read(1))
        assert tape.gradient(loss, x) is not None
        return given.read(0), given.read(1), own.read(1)

    with apply_profile(Recipe("mixed_bfloat16", batch_size=5), model=model):
        run = tf.function(total) if traced else total
        first, second, own = run(tf.constant(X))
        np.testing.assert_array_equal(second, tf.cast(own, "float32"))
        np.testing.assert_array_equal(first[: len(second)], second)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Sealed, "one of a kind"),
        (Distribution, "fixed its own dtype"),
    ],
)
def test_what_cannot_be_rebuilt_is_named_once(make, why):
    model = Net(make)
    model(X)
    with apply_profile(Recipe("mixed_bfloat16", batch_size=5), model=model):
        with pytest.warns(AutoprecWarning, match=rf"returns a .*{make.__name__}.*{why}.*ops\.cast"):
            given = model(X)
        assert given.logits.dtype == "bfloat16"
        with warnings.catch_warnings():
            warnings.simplefilter("error", AutoprecWarning)
            model(X)


def test_a_function_that_encloses_a_16_bit_tensor_is_named_at_the_first_call():
    model = Net(lambda z: (z, lambda: z))
    model(X)
    message = r"returns a function with 16-bit .*keeps the variables that it encloses"
    with apply_profile(Recipe("mixed_bfloat16", batch_size=5), model=model):
        with pytest.warns(AutoprecWarning, match=message):
            logits, later = model(X)
        assert logits.dtype == "float32"
        assert later().dtype == "bfloat16"
        with warnings.catch_warnings():
            warnings.simplefilter("error", AutoprecWarning)
            model(X)


def test_a_model_that_trains_on_a_dataclass_gets_a_float32_softmax():
    """The activation that ends the model is computed in float32, inside an object too."""

    class Trained(Net):
        def __init__(self):
            super().__init__(Output)
            self.head = keras.layers.Dense(4, activation="softmax")

        def call(self, x):
            return Output(self.head(self.hidden(x)))

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            assert y_pred.logits.dtype == "float32"
            return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred.logits))

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            return self.get_metrics_result()

    model = Trained()
    model(X)
    model.compile(keras.optimizers.SGD(0.1))
    recipe = Recipe("mixed_float16", batch_size=5, loss_scale=LossScale(initial=64.0))
    with apply_profile(recipe, model=model) as precision:
        model.fit(X, np.arange(5) % 4, batch_size=5, epochs=2, verbose=0)
        assert (precision.steps, precision.skipped) == (2, 0)
        np.testing.assert_allclose(np.sum(model(X).logits, axis=-1), 1.0, atol=1e-6)


def by_operations():
    """Outputs that operations make of layers, with nothing of Keras's at the end."""
    inputs = keras.Input((4, 8))
    hidden = keras.layers.Dense(8)(inputs)
    scores = keras.layers.Dense(4)(hidden)
    first, _ = keras.ops.split(scores, 2, axis=-1)
    outputs = {
        "classes": keras.ops.log_softmax(scores),
        "mean": keras.ops.mean(hidden, axis=-1),
        "first": first,
        "hidden": keras.layers.Identity()(hidden),
        "best": keras.ops.argmax(scores, axis=-1),
    }
    return keras.Model(inputs, outputs)


def by_layers_of_many():
    """Layers that give several outputs, and a model inside that does."""
    inputs = keras.Input((4, 8))
    sequence, *states = keras.layers.LSTM(4, return_sequences=True, return_state=True)(inputs)
    attended, weights = keras.layers.MultiHeadAttention(2, 4)(
        sequence, sequence, return_attention_scores=True
    )
    inner = keras.Model(inputs, [keras.layers.Dense(4)(inputs), keras.layers.Dense(3)(inputs)])
    one, other = inner(inputs)
    joined = keras.layers.Concatenate()([one, attended])
    return keras.Model(inputs, [joined, keras.layers.Activation("relu")(other), weights, states])


@pytest.mark.parametrize("make", [by_operations, by_layers_of_many])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_every_output_of_a_functional_model_is_float32_however_it_is_called(make, policy):
    model = make()
    x = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
    plain = keras.tree.flatten(model(x))
    with apply_profile(Recipe(policy, batch_size=2), model=model):
        traced = tf.function(lambda given: model(given, training=True))
        for found in (model(x), traced(tf.constant(x)), model.predict(x, verbose=0)):
            for ours, theirs in zip(keras.tree.flatten(found), plain, strict=True):
                assert keras.backend.standardize_dtype(ours.dtype) == theirs.dtype.name
            pairs = zip(keras.tree.flatten(found), plain, strict=True)
            assert not all(np.array_equal(*pair) for pair in pairs)  # computed in 16 bits


class OwnSteps(Net):
    """Calls its layers in its steps, not itself."""

    def __init__(self):
        super().__init__(lambda z: z)

    def predict_step(self, given):
        return {"embedding": self.hidden(given[0] if isinstance(given, tuple) else given)}

    def test_step(self, given):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(given)
        out = self.head(self.hidden(x))
        return {"error": keras.ops.mean(keras.ops.square(out - keras.ops.cast(y, out.dtype)))}


@pytest.mark.parametrize("eager", [False, True], ids=["traced", "eager"])
def test_what_a_models_own_steps_return_is_float32(eager):
    model = OwnSteps()
    model.compile("sgd", run_eagerly=eager)
    exact = model.predict(X, verbose=0)["embedding"]
    with apply_profile(Recipe("mixed_bfloat16", batch_size=5), model=model):
        found = model.predict(X, verbose=0)["embedding"]
        assert found.dtype == "float32"
        assert not np.array_equal(found, exact)
        np.testing.assert_allclose(found, exact, atol=0.05)
        model.make_test_function()
        error = model.test_function(iter([(tf.constant(X), tf.zeros((5, 4)))]))["error"]
        assert error.dtype == "float32"
    assert "predict_step" not in vars(model)


@pytest.mark.parametrize("profiled", [False, True], ids=["plain", "profile"])
def test_an_object_that_keras_cannot_predict_is_refused_by_keras_with_a_profile_or_without(
    profiled,
):
    model = Net(Output)
    model(X)
    recipe = Recipe("mixed_bfloat16" if profiled else "float32", batch_size=5)
    message = "must return zero or more Tensors or ExtensionTypes"
    with apply_profile(recipe, model=model), pytest.raises(TypeError, match=message):
        model.predict(X, verbose=0)
