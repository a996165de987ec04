"""Loan defaults from a table: several inputs, embeddings, normalised numbers, two outputs."""

import keras
import numpy as np

NUMBERS = 20
REGIONS, JOBS = 50, 300


def build_model() -> keras.Model:
    numbers = keras.Input((NUMBERS,), name="numbers")
    region = keras.Input((1,), dtype="int32", name="region")
    job = keras.Input((1,), dtype="int32", name="job")
    looked_up = [
        keras.layers.Flatten()(keras.layers.Embedding(size, 16)(given))
        for size, given in ((REGIONS, region), (JOBS, job))
    ]
    features = keras.layers.Concatenate()([keras.layers.BatchNormalization()(numbers), *looked_up])
    for _ in range(3):
        hidden = keras.layers.Dense(256, activation="gelu")(features)
        hidden = keras.layers.LayerNormalization()(keras.layers.Dropout(0.1)(hidden))
        features = keras.layers.Concatenate()([features, hidden])
    default = keras.layers.Dense(1, activation="sigmoid", name="default")(features)
    amount = keras.layers.Dense(1, name="amount")(features)
    model = keras.Model([numbers, region, job], {"default": default, "amount": amount})
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3, weight_decay=1e-4),
        loss={"default": "binary_crossentropy", "amount": keras.losses.Huber()},
        loss_weights={"default": 1.0, "amount": 0.3},
    )
    return model


def build_data(batch_size: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    count = 8 * batch_size
    numbers = generator.normal(size=(count, NUMBERS)).astype("float32")
    region = generator.integers(REGIONS, size=(count, 1)).astype("int32")
    job = generator.integers(JOBS, size=(count, 1)).astype("int32")
    risk = numbers[:, 0] - 0.5 * numbers[:, 1] + 0.1 * (region[:, 0] % 5)
    default = (risk + generator.normal(size=count) > 0.5).astype("float32")[:, None]
    amount = (np.abs(numbers[:, 2]) + 0.2 * job[:, 0] / JOBS).astype("float32")[:, None]
    inputs = {"numbers": numbers, "region": region, "job": job}
    return inputs, {"default": default, "amount": amount}
