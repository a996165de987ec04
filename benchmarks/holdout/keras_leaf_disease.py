"""Plant diseases from photographs: separable convolutions, squeeze-and-excitation, flips."""

import keras
import numpy as np
import tensorflow as tf

SIDE, KINDS = 48, 8


def squeezed(images: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    """Scale every channel by what the whole image says of it."""
    pooled = keras.layers.GlobalAveragePooling2D(keepdims=True)(images)
    small = keras.layers.Conv2D(filters // 4, 1, activation="relu")(pooled)
    return images * keras.layers.Conv2D(filters, 1, activation="sigmoid")(small)


def build_model() -> keras.Model:
    inputs = keras.Input((SIDE, SIDE, 3))
    images = keras.layers.Rescaling(1 / 255)(inputs)
    images = keras.layers.RandomFlip("horizontal")(images)
    for filters in (32, 64, 96):
        images = keras.layers.SeparableConv2D(filters, 3, padding="same", use_bias=False)(images)
        images = keras.layers.BatchNormalization()(images)
        images = squeezed(keras.layers.Activation("silu")(images), filters)
        images = keras.layers.MaxPooling2D()(images)
    pooled = keras.layers.Dropout(0.3)(keras.layers.GlobalAveragePooling2D()(images))
    model = keras.Model(inputs, keras.layers.Dense(KINDS)(pooled))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def build_data(batch_size: int) -> tf.data.Dataset:
    generator = np.random.default_rng(0)
    count = 6 * batch_size
    kinds = generator.integers(KINDS, size=count)
    colours = np.linspace(40, 215, KINDS)[kinds][:, None, None, None]
    images = colours + 40 * generator.normal(size=(count, SIDE, SIDE, 3))
    images = np.clip(images, 0, 255).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((images, kinds))
    return dataset.shuffle(count, seed=0).batch(batch_size, drop_remainder=True)
