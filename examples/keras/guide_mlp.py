"""The TensorFlow guide's model: 784-4096-4096-10, on MNIST-sized digits.

scikit-learn's 8 x 8 digits are enlarged to 28 x 28 and repeated, so that any batch size can be had.
The softmax is a layer of its own kept in float32, as the guide asks: a model's output should be
float32 also where the rest computes in 16 bits. There is no BATCH_SIZE: the tuner may choose it.

    autoprec tune examples/keras/guide_mlp.py
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

TEST_IMAGES = 360


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """Return 1797 images as rows of 784 float32 values in 0..1, and their classes."""
    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")
    images = images.repeat(3, axis=1).repeat(3, axis=2)  # 8 x 8 to 24 x 24
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))  # to 28 x 28
    return images.reshape(len(images), -1), digits.target


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(4096, activation="relu"),
            keras.layers.Dense(4096, activation="relu"),
            keras.layers.Dense(10),
            keras.layers.Activation("softmax", dtype="float32"),
        ]
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.RMSprop(1e-4),
        metrics=["accuracy"],
    )
    return model


def build_data(batch_size: int) -> tf.data.Dataset:
    """Return endless shuffled batches; the input stays float32, each layer casts for itself."""
    images, classes = load_images()
    data = tf.data.Dataset.from_tensor_slices((images[:-TEST_IMAGES], classes[:-TEST_IMAGES]))
    data = data.shuffle(len(images), seed=0).repeat()
    return data.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def evaluate(model: keras.Model) -> float:
    """Return the accuracy on the test images."""
    images, classes = load_images()
    predicted = model.predict(images[-TEST_IMAGES:], verbose=0).argmax(axis=1)
    return float((predicted == classes[-TEST_IMAGES:]).mean())
