"""Whole runs of Keras scripts: with their profile of 16 bits and without, nothing after them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec import Policy, Recipe
from autoprec.api import verify_script
from autoprec.core.recipe import LossScale

pytest.importorskip("keras")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="runs are ended by their process group"),
]

FIT = """
from pathlib import Path
import keras
import numpy as np
from autoprec import apply_profile

class Count(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        made = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        Path(f"made-{precision.policy}").write_text(str(made))

precision = apply_profile("model.profile.yaml")
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(1e-2), loss)
data = np.random.default_rng(0).normal(size=(512, 16)).astype("float32")
how = {"batch_size": precision.batch_size, "epochs": 4, "verbose": 0, "callbacks": [Count()]}
model.fit(data, data[:, :4].argmax(1), **how)
open("after", "w").close()
"""

#: An update is a batch, two of them, or a fourth of what fit runs as one.
RECIPES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"policy": Policy.MIXED_FLOAT16, "loss_scale": LossScale(initial=1024.0)},
    "accumulation": {"batch_size": 16, "accumulation_steps": 2},
    "several steps as one": {"knobs": {"steps_per_execution": 4}},
}


@pytest.mark.parametrize("settings", RECIPES.values(), ids=RECIPES)
def test_a_fit_is_run_with_its_profile_and_without(
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    write_profile: Callable[[Recipe, str], Path],
    request: pytest.FixtureRequest,
) -> None:
    if settings:  # the first runs are started as users start them
        request.getfixturevalue("forked_runs")
    recipe = Recipe(**{"policy": Policy.MIXED_BFLOAT16, "batch_size": 32, **settings})
    monkeypatch.chdir(write_profile(recipe, "keras").parent)
    Path("train.py").write_text(FIT)
    found = verify_script("model.profile.yaml", "train.py", rounds=1, updates=20)
    assert [each.name for each in found.claims] == ["end to end", "losses"]
    losses = found.claims[1]
    assert losses.result == "holds", losses
    assert not losses.found.startswith("0 % apart")
    assert not Path("after").exists()
    made = {each.name: each.read_text() for each in Path().glob("made-*")}
    assert made == {"made-float32": "20", f"made-{recipe.policy}": "20"}
