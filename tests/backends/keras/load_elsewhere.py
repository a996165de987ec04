"""Loads a file in a process that knows Keras alone, and prints what it found as JSON.

Arguments: the file, and what is to be done with it: `load` a .keras file, or read the `weights` of
a .weights.h5 file into a compiled model of the same shape.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import keras
    import numpy as np


def same_shape() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    return model


def main(path: str, what: str) -> None:
    warnings.simplefilter("error", UserWarning)  # Keras warns where it drops an optimizer's state
    if what == "load":
        model = keras.saving.load_model(path)
    else:
        model = same_shape()
        model.load_weights(path)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    x = np.linspace(-1, 1, 64, dtype="float32").reshape(8, 8)
    found = {
        "autoprec": "autoprec" in sys.modules,
        "optimizer": type(model.optimizer).__name__,
        "iterations": int(inner.iterations),
        "state": [np.asarray(v.numpy()).sum().item() for v in inner.variables[2:]],
        "outputs": model.predict(x, verbose=0).tolist(),
        "dtypes": [layer.compute_dtype for layer in model.layers],
    }
    model.fit(x, np.arange(8) % 4, verbose=0)
    print(json.dumps(found))


main(sys.argv[1], sys.argv[2])
