"""One of the two processes of test_workers: a custom loop under MultiWorkerMirroredStrategy.

Its arguments are its index and the two ports. Without any it trains alone, at the same batch.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import replace

import keras
import tensorflow as tf

from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.recipe import Distributed, Recipe
from autoprec.errors import AutoprecWarning, UsageError
from tests.backends.keras.keras_models import data, softmax_net
from tests.backends.keras.replicas.replica_pairs import FLOAT16, sgd
from tests.backends.keras.replicas.replicas_in_loops import loop

RECIPES = {
    "plain": Recipe(batch_size=16),
    "accumulating": Recipe(batch_size=8, accumulation_steps=4),
    "overflowing": replace(
        FLOAT16, batch_size=8, distributed=Distributed(engine="mirrored", world_size=2)
    ),
}


def main() -> None:
    strategy = tf.distribute.get_strategy()
    if len(sys.argv) > 1:
        index, *ports = sys.argv[1:]
        workers = [f"127.0.0.1:{port}" for port in ports]
        task = {"type": "worker", "index": int(index)}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    found = {}
    for name, recipe in RECIPES.items():
        x, y = data(80)
        if name == "overflowing":
            x[24:32] = 6e4  # the second half of the second batch
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model, optimizer = softmax_net(), sgd()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoprecWarning)
            precision = KerasSurgeon().apply(recipe, model=model, optimizers=[optimizer])
        loop(model, precision, x, y, strategy)
        flushed = precision.flush()
        weights = [weight.tolist() for weight in model.get_weights()]
        counts = [precision.steps, precision.skipped, precision.scale, flushed]
        found[name] = {"counts": counts, "weights": weights}
    try:
        model.fit(x, y, 16, verbose=0)
    except UsageError as error:
        found["fit"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
