"""Eight kinds of models as users write them, with data, and the ways of training them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.backends.keras.keras_models import OwnTrainStep, Pair

STEPS, BATCH = 4, 8
RATE = 0.05

layers = keras.layers


def sequential() -> Any:
    return keras.Sequential(
        [layers.Input((8,)), layers.Dense(16, activation="tanh"), layers.Dense(4), softmax()]
    )


def softmax() -> Any:
    """A last layer that is float32 under every policy, as Keras's guide asks for."""
    return layers.Activation("softmax", dtype="float32")


def linear() -> Any:
    return layers.Activation("linear", dtype="float32")


def two_by_two() -> Any:
    first, second = keras.Input((8,), name="first"), keras.Input((4,), name="second")
    joined = layers.Concatenate()([layers.Dense(8)(first), layers.Dense(8)(second)])
    hidden = layers.Dense(8, activation="tanh")(joined)
    outputs = [softmax()(layers.Dense(4)(hidden)), linear()(layers.Dense(1)(hidden))]
    return keras.Model([first, second], outputs)


def nested() -> Any:
    inner = keras.Sequential(
        [layers.Input((8,)), layers.Dense(16, activation="tanh"), layers.LayerNormalization()]
    )
    inputs = keras.Input((8,))
    return keras.Model(inputs, softmax()(layers.Dense(4)(inner(inputs))))


@keras.saving.register_keras_serializable(package="kinds")
class Own(OwnTrainStep):
    """Subclassed, with a train_step of its own."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.head = layers.Dense(4)
        self.end = softmax()

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.head.build((shape[0], 16))

    def call(self, x: Any) -> Any:
        return self.end(self.head(self.hidden(x)))

    def train_step(self, given: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(given)
        return super().train_step((x, y))


@keras.saving.register_keras_serializable(package="kinds")
class Vae(keras.Model):
    """Adds its KL term as a loss, in float32, which Keras's own policy needs."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.hidden = layers.Dense(16, activation="tanh")
        self.mean, self.spread = layers.Dense(2), layers.Dense(2)
        self.out, self.end = layers.Dense(8), linear()

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.mean.build((shape[0], 16))
        self.spread.build((shape[0], 16))
        self.out.build((shape[0], 2))

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        kl = 1 + spread - keras.ops.square(mean) - keras.ops.exp(spread)
        self.add_loss(-0.05 * keras.ops.mean(keras.ops.cast(kl, "float32")))
        return self.end(self.out(mean + 0.1 * keras.ops.exp(0.5 * spread)))


@keras.saving.register_keras_serializable(package="kinds")
class Gan(Pair):
    """Two networks and two optimizers; scales its losses, as float16 asks for."""

    def __init__(self, **more: Any) -> None:
        super().__init__()

    def build(self, shape: Any) -> None:
        """Nothing: both networks are built when they are made."""

    def compile_from_config(self, config: Any) -> None:
        """Not compiled when loaded: its optimizers are not in a file."""

    def get_compile_config(self) -> Any:
        return None

    def train_step(self, given: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(given)
        return super().train_step(x)

    def _update(self, tape: Any, loss: Any, part: Any, optimizer: Any) -> None:
        with tape:
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, part.trainable_weights)
        optimizer.apply_gradients(zip(gradients, part.trainable_weights, strict=True))


def recurrent() -> Any:
    return keras.Sequential(
        [
            layers.Input((6,), dtype="int32"),
            layers.Embedding(20, 8, mask_zero=True),
            layers.LSTM(8),
            layers.Dense(4),
            softmax(),
        ]
    )


def application() -> Any:
    """The first blocks of a network of keras.applications, of every layer that it has, and a head.

    Its inputs come prepared.
    """
    base = keras.applications.MobileNet((32, 32, 3), alpha=0.25, include_top=False, weights=None)
    features = layers.GlobalAveragePooling2D()(base.get_layer("conv_pw_3_relu").output)
    return keras.Model(base.inputs[0], softmax()(layers.Dense(4)(features)))


def vectors(seed: int, width: int = 8) -> Any:
    random = np.random.default_rng(seed)
    return random.normal(size=(STEPS * BATCH, width)).astype("float32")


def labels() -> Any:
    return np.arange(STEPS * BATCH) % 4


def texts() -> Any:
    random = np.random.default_rng(3)
    found = random.integers(1, 20, (STEPS * BATCH, 6))
    found[:, 4:] *= random.integers(0, 2, (STEPS * BATCH, 1))
    return found.astype("int32")


def images() -> Any:
    random = np.random.default_rng(4)
    return random.uniform(-1, 1, (STEPS * BATCH, 32, 32, 3)).astype("float32")


@dataclass(frozen=True)
class Kind:
    """A model, its data, its loss; `tolerance` is what rounding may do to a step's loss.

    A `chaotic` one magnifies rounding so much that only the same graph gives the same losses.
    """

    build: Callable[[], Any]
    data: Callable[[], tuple[Any, Any]]
    loss: Any = "sparse_categorical_crossentropy"
    tolerance: float = 2e-3
    chaotic: bool = False


KINDS = {
    "sequential": Kind(sequential, lambda: (vectors(1), labels())),
    "two by two": Kind(
        two_by_two,
        lambda: ([vectors(1), vectors(2, 4)], [labels(), vectors(5, 1)]),
        ["sparse_categorical_crossentropy", "mse"],
    ),
    "nested": Kind(nested, lambda: (vectors(1), labels())),
    "train_step": Kind(Own, lambda: (vectors(1), labels())),
    "vae": Kind(Vae, lambda: (vectors(1), vectors(1)), "mse"),
    "gan": Kind(Gan, lambda: (vectors(1), None), None),
    "recurrent": Kind(recurrent, lambda: (texts(), labels())),
    "application": Kind(application, lambda: (images(), labels()), tolerance=3e-2, chaotic=True),
}


def compile_kind(model: Any, kind: Kind, **more: Any) -> Any:
    """Compile the model with SGD: what it does to weights is as large as the gradient."""
    if isinstance(model, Gan):
        model.compile(keras.optimizers.SGD(RATE, **more), keras.optimizers.SGD(RATE, **more))
    else:
        model.compile(keras.optimizers.SGD(RATE, **more), kind.loss)
    return model


def slice_samples(values: Any, start: int) -> Any:
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else leaf[start : start + BATCH], values
    )


def by_batch(kind: Kind) -> Sequence[tuple[Any, Any]]:
    x, y = kind.data()
    return [(slice_samples(x, at), slice_samples(y, at)) for at in range(0, STEPS * BATCH, BATCH)]


class Losses(keras.callbacks.Callback):
    """The loss of each batch, not the mean so far."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(total(logs))


def total(logs: Any) -> float:
    """The loss, or the sum of a GAN's two."""
    return float(logs["loss"] if "loss" in logs else logs["d_loss"] + logs["g_loss"])


def by_fit(model: Any, kind: Kind) -> list[float]:
    x, y = kind.data()
    watch = Losses()
    given = {"x": x} if y is None else {"x": x, "y": y}
    model.fit(**given, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[watch])
    return watch.found


def by_train_on_batch(model: Any, kind: Kind) -> list[float]:
    found = []
    for x, y in by_batch(kind):
        model.reset_metrics()
        found.append(total(model.train_on_batch(x, y, return_dict=True)))
    return found


def by_loop(model: Any, kind: Kind) -> list[float]:
    """A GradientTape loop over the model's own loss and optimizer; a GAN's is its train_step."""
    if isinstance(model, Gan):
        return [total(model.train_step(tf.constant(x))) for x, _ in by_batch(kind)]

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
            scaled = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_weights)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return loss

    return [float(step(x, y)) for x, y in by_batch(kind)]


WAYS = {"fit": by_fit, "train_on_batch": by_train_on_batch, "loop": by_loop}
