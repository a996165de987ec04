"""A Keras convolutional net on 32 x 32 images."""

import keras
import numpy as np


def build_model() -> keras.Model:
    def block(filters: int, stride: int) -> list[keras.layers.Layer]:
        convolution = keras.layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)
        return [convolution, keras.layers.BatchNormalization(), keras.layers.ReLU()]

    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            *block(32, 1),
            *block(64, 2),
            *block(128, 2),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss=loss)
    return model


def build_data(batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    count = 4 * batch_size
    images = generator.normal(size=(count, 32, 32, 3)).astype("float32")
    return images, generator.integers(10, size=count)
