"""A Keras multilayer perceptron: XLA pays at small batches and not at large ones."""

import keras
import numpy as np


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((512,)),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss)
    return model


def build_data(batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    count = 4 * batch_size
    inputs = generator.normal(size=(count, 512)).astype("float32")
    return inputs, generator.integers(10, size=count)
