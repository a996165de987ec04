"""Small models and data that several tests share."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from autoprec.backends.keras.apply.compile_overrides import retrace_functions


def data(samples: int = 32, features: int = 8, classes: int = 4, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    x = random.normal(size=(samples, features)).astype("float32")
    return x, random.integers(0, classes, samples)


def softmax_net(features: int = 8, classes: int = 4, **compile_arguments: Any) -> Any:
    model = keras.Sequential(
        [
            keras.layers.Input((features,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(classes, activation="softmax"),
        ]
    )
    return compiled(model, **compile_arguments)


def compiled(model: Any, **arguments: Any) -> Any:
    arguments.setdefault("optimizer", keras.optimizers.SGD(0.05))
    arguments.setdefault("loss", "sparse_categorical_crossentropy")
    model.compile(**arguments)
    return model


def eagerly(model: Any) -> Any:
    """Let a model train without a trace, whose making takes ten times as long as a few steps."""
    model.run_eagerly = True
    retrace_functions(model, watched=True)
    return model


class Subclassed(keras.Model):
    """A model without a graph, ending in a Dense with a softmax."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(16, activation="relu")
        self.head = keras.layers.Dense(classes, activation="softmax")

    def call(self, x: Any) -> Any:
        return self.head(self.hidden(x))


class LogitsThenOwnCode(keras.Model):
    """A model whose own code computes the softmax after its last layer."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(16, activation="relu")
        self.head = keras.layers.Dense(classes)

    def call(self, x: Any) -> Any:
        return keras.ops.softmax(self.head(self.hidden(x)))


class OwnTrainStep(Subclassed):
    """A subclass with the custom train_step of Keras's guide for TensorFlow."""

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Unscaled(Subclassed):
    """A train_step that knows nothing of loss scales."""

    def train_step(self, given: Any) -> Any:
        import tensorflow as tf

        x, y = given
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class Pair(keras.Model):
    """A GAN as Keras's guide writes it: two networks, two optimizers, its own compile."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        layers = keras.layers
        more = [layers.BatchNormalization()] if norm else []
        self.generator = keras.Sequential(
            [layers.Input((4,)), layers.Dense(8), *more], name="generator"
        )
        self.discriminator = keras.Sequential(
            [layers.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(1)],
            name="discriminator",
        )

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def call(self, given: Any) -> Any:
        return self.discriminator(given)

    def train_step(self, real: Any) -> Any:
        import tensorflow as tf

        loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        count = tf.shape(real)[0]
        noise = real[:, :4] * 0.5
        with tf.GradientTape() as tape:
            both = keras.ops.concatenate([real, self.generator(noise)])
            labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], 0)
            d_loss = loss_fn(labels, self.discriminator(both))
        self._update(tape, d_loss, self.discriminator, self.d_optimizer)
        with tf.GradientTape() as tape:
            g_loss = loss_fn(
                tf.ones((count, 1)), self.discriminator(self.generator(noise, training=True))
            )
        self._update(tape, g_loss, self.generator, self.g_optimizer)
        return {"d_loss": d_loss, "g_loss": g_loss}

    def _update(self, tape: Any, loss: Any, part: Any, optimizer: Any) -> None:
        gradients = tape.gradient(loss, part.trainable_weights)
        optimizer.apply_gradients(zip(gradients, part.trainable_weights, strict=True))


@keras.saving.register_keras_serializable(package="tests")
class Overflows(keras.layers.Layer):
    """Passes its input on; a first value above 100 makes the gradient infinite."""

    def call(self, x: Any) -> Any:
        planted = keras.ops.where(keras.ops.abs(x[:, :1]) > 100.0, np.inf, 1.0)
        return x + keras.ops.stop_gradient(x * 0) + x * keras.ops.cast(planted, x.dtype) * 0.0
