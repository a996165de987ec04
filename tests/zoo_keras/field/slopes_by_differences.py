"""A net for u' = -u, its slopes differences of outputs: wrong once the loss is small."""

from __future__ import annotations

import keras
import tensorflow as tf
from field_parts_keras import batches, in_float32, perceptron

TRUTH_STEPS = 400
APART = 0.02


class Slopes(keras.Model):
    def train_step(self, data):
        (points,) = data
        with tf.GradientTape() as tape:
            u, further = (self(points + shift, training=True) for shift in (0.0, APART))
            start = self(tf.zeros((1, 1)), training=True)
            residual = tf.reduce_mean(tf.square((further - u) / APART + u))
            loss = residual + tf.reduce_mean(tf.square(start - 1))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def build_model():
    inputs = keras.Input((1,))
    model = Slopes(inputs, in_float32(perceptron(32, 1)(inputs)))
    model.compile(keras.optimizers.Adam(5e-3))
    return model


def build_data(batch_size):
    return batches(lambda random: (2 * random.random((batch_size, 1)).astype("float32"),))
