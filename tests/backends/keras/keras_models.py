"""Small models and data that several tests share."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


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
    arguments.setdefault("optimizer", keras.optimizers.Adam(1e-2))
    arguments.setdefault("loss", "sparse_categorical_crossentropy")
    model.compile(**arguments)
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


@keras.saving.register_keras_serializable(package="tests")
class Overflows(keras.layers.Layer):
    """Passes its input on; a first value above 100 makes the gradient infinite."""

    def call(self, x: Any) -> Any:
        planted = keras.ops.where(keras.ops.abs(x[:, :1]) > 100.0, np.inf, 1.0)
        return x + keras.ops.stop_gradient(x * 0) + x * keras.ops.cast(planted, x.dtype) * 0.0
