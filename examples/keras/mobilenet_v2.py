"""MobileNetV2 from random weights, on scikit-learn's digits enlarged to 32 x 32 x 3.

Its depthwise convolutions move much memory for little arithmetic: mixed precision can make it
slower, and measuring is the only way to know.

    autoprec tune examples/keras/mobilenet_v2.py
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

BATCH_SIZE = 32  # the batch trained with: kept
IMAGE_SIZE = 32
TEST_IMAGES = 360


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """Return 1797 images of 32 x 32 x 3 float32 values in -1..1, and their classes."""
    digits = load_digits()
    images = (digits.images / 8.0 - 1.0).astype("float32")[..., None]
    images = tf.image.resize(images, (IMAGE_SIZE, IMAGE_SIZE)).numpy()
    return images.repeat(3, axis=-1), digits.target


def build_model() -> keras.Model:
    features = keras.applications.MobileNetV2(
        (IMAGE_SIZE, IMAGE_SIZE, 3), include_top=False, weights=None, pooling="avg"
    )
    logits = keras.layers.Dense(10)(features.output)
    outputs = keras.layers.Activation("softmax", dtype="float32")(logits)
    model = keras.Model(features.input, outputs)
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
