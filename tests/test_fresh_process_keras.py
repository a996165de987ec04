"""A profile tuned for Keras trains to the same weights, bit by bit, in every fresh process.

The processes that train are a user's, and so is the tuning that goes on where another has ended:
nothing of them was imported beforehand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import AUTOPREC

from autoprec.cli import main
from autoprec.core.dtypes import Policy
from autoprec.profiles import load_profile

ROOT = Path(__file__).parent.parent

TASK = """
import keras
import numpy as np

BATCH_SIZE = 32


def build_model():
    layers = [keras.Input((64,)), keras.layers.Dense(128, activation="relu")]
    layers += [keras.layers.Dropout(0.1, seed=1), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss)
    return model


def build_data(batch_size):
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(8 * batch_size, 64)).astype("float32")
    return inputs, inputs[:, :10].argmax(1)
"""

#: Trains in several ways, with the profile or under Keras's own policy; prints the losses and the
#: weights' digest of each.
TRAIN = """
import hashlib, json, sys
import keras, model
from autoprec import apply_profile, load_profile

path, *ways = sys.argv[1:]
recipe = load_profile(path).recipe


def trained(way):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    policy = "mixed_bfloat16" if way == "Keras's policy" else "float32"
    keras.config.set_dtype_policy(policy)
    net = model.build_model()
    if way == "profile":
        precision = apply_profile(path, model=net)
        assert precision.batch_size == recipe.batch_size
    if way == "Keras's policy":
        loss = net.loss
        net.loss = lambda y, p: loss(y, keras.ops.cast(p, "float32"))
        net.compile(optimizer=net.optimizer, loss=net.loss)
    inputs, targets = model.build_data(model.BATCH_SIZE)
    told = net.fit(inputs, targets, batch_size=recipe.batch_size, epochs=3, verbose=0)
    weights = b"".join(w.numpy().tobytes() for w in net.trainable_variables)
    losses = [float(loss).hex() for loss in told.history["loss"]]
    return losses, hashlib.sha256(weights).hexdigest()


print(json.dumps([trained(way) for way in ways]))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("unmeasured")
def test_a_profile_gives_the_weights_of_keras_own_policy_in_every_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread sums are formed in one order; plain float32 ends with other weights."""
    task, profile = tmp_path / "model.py", tmp_path / "model.profile.yaml"
    task.write_text(TASK, encoding="utf-8")
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.setenv(name, "1")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, tmp_path))),
        "TMPDIR": str(tmp_path),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }

    def run(*words: object) -> str:
        done = subprocess.run(
            [*map(str, words)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    quick = ("--trials", 2, "--rounds", 1, "--proof-steps", 30, "--no-extras")
    own = ("--output", profile, "--storage", tmp_path / "study.journal")
    only = ("--device", "cpu", "--policies", "mixed_bfloat16", "--batch-sizes", 32)
    words = list(map(str, ("tune", task, *only, *own, *quick)))
    assert main(words) == 0
    tuned = load_profile(profile)
    run(*AUTOPREC, *words)
    assert load_profile(profile) == tuned
    recipe = tuned.recipe
    assert recipe.policy is Policy.MIXED_BFLOAT16
    assert (recipe.batch_size, recipe.accumulation_steps) == (32, 1)

    def train(*ways: str) -> Any:
        return json.loads(run(sys.executable, "-c", TRAIN, profile, *ways))

    (first,) = train("profile")
    again, by_hand, float32 = train("profile", "Keras's policy", "float32")
    assert len(set(first[0])) == 3  # it trains
    assert first == again
    assert first == by_hand
    assert first[1] != float32[1]
