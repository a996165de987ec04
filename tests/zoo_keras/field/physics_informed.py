"""A physics-informed net for u' = -u: the slope through a tape in train_step, no data."""

from __future__ import annotations

import keras
import tensorflow as tf
from field_parts_keras import batches

TRUTH_STEPS = 1000


class Decay(keras.Model):
    def __init__(self):
        super().__init__()
        dense = keras.layers.Dense
        self.body = [dense(32, activation="tanh"), dense(32, activation="tanh"), dense(1)]
        self.end = keras.layers.Activation("linear", dtype="float32")

    def build(self, shape):
        for layer, width in zip(self.body, (1, 32, 32), strict=True):
            layer.build((None, width))

    def call(self, x):
        for layer in self.body:
            x = layer(x)
        return self.end(x)

    def train_step(self, data):
        (points,) = data if isinstance(data, tuple) else (data,)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(points)
                u = self(points, training=True)
            slope = inner.gradient(u, points)
            start = self(tf.zeros((1, 1)), training=True)
            residual = tf.reduce_mean(tf.square(slope + u))
            loss = residual + tf.reduce_mean(tf.square(start - 1))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def build_model():
    model = Decay()
    model.build((None, 1))
    model.compile(keras.optimizers.Adam(5e-3))
    return model


def build_data(batch_size):
    return batches(lambda random: (2 * random.random((batch_size, 1)).astype("float32"),))
