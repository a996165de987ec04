"""Three wide convolutions with large kernels: 32 of 5 x 5, 64 of 7 x 7, 128 of 11 x 11.

The net that is often used to try mixed precision on small photographs, here on scikit-learn's
digits enlarged to 64 x 64 x 3. Nearly all its time is arithmetic: where the device computes 16-bit
convolutions faster, this net shows it.

    autoprec tune examples/keras/conv3.py
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

BATCH_SIZE = 32  # the batch trained with: kept
IMAGE_SIZE = 64
TEST_IMAGES = 360


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """Return 1797 images of 64 x 64 x 3 float32 values in 0..1, and their classes."""
    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")[..., None]
    images = tf.image.resize(images, (IMAGE_SIZE, IMAGE_SIZE)).numpy()
    return images.repeat(3, axis=-1), digits.target


def convolution(filters: int, kernel: int) -> list[keras.layers.Layer]:
    """Return the layers of a convolution of stride 2 with BatchNorm and ReLU."""
    return [
        keras.layers.Conv2D(filters, kernel, strides=2, padding="same", use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
    ]


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3)),
            *convolution(32, 5),
            *convolution(64, 7),
            *convolution(128, 11),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
            keras.layers.Activation("softmax", dtype="float32"),
        ]
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.Adam(1e-3),
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
