"""Pairs told apart by cosines over a learned temperature, in a train_step of its own: healthy."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from field_parts_keras import batches, fixed, normal, perceptron

TRUTH_STEPS = 300


class Pairs(keras.Model):
    def __init__(self):
        super().__init__()
        self.left, self.right = perceptron(64, 16, "relu"), perceptron(64, 16, "relu")

    def build(self, shape):
        self.left.build((None, 24))
        self.right.build((None, 24))
        start = keras.initializers.Constant(float(np.log(1 / 0.07)))
        self.temperature = self.add_weight(shape=(), initializer=start, name="temperature")

    def call(self, pair):
        a, b = (tf.math.l2_normalize(x, -1) for x in (self.left(pair[0]), self.right(pair[1])))
        return tf.matmul(a, b, transpose_b=True) * tf.exp(tf.cast(self.temperature, a.dtype))

    def train_step(self, data):
        pair = keras.utils.unpack_x_y_sample_weight(data)[0]
        with tf.GradientTape() as tape:
            logits = tf.cast(self(pair, training=True), "float32")
            own = tf.range(tf.shape(logits)[0])
            there, back = (
                tf.nn.sparse_softmax_cross_entropy_with_logits(own, each)
                for each in (logits, tf.transpose(logits))
            )
            loss = tf.reduce_mean(there + back) / 2
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def build_model():
    model = Pairs()
    model.build((None, 24))
    model.compile(keras.optimizers.Adam(1e-3))
    return model


def build_data(batch_size):
    def make(random):
        shared = normal(random, batch_size, 8)
        a, b = (
            (shared @ fixed(8, 24, seed=seed) + 0.5 * normal(random, batch_size, 24))
            for seed in (5, 6)
        )
        return ((a, b),)

    return batches(make)
