"""A Keras script is tuned as it stands: up to its own fit, and with nothing after it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from autoprec.core.recipe import Recipe
from autoprec.errors import TaskError
from autoprec.workers.failures import FailureKind, WorkerFailure
from tests.training_scripts import QUICK, Project

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")

FITS = """
import argparse, json
from pathlib import Path
import keras
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, required=True)
arguments = parser.parse_args()
units = json.loads(Path(__file__).with_name("settings").read_text())["units"]
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(arguments.rate), "mse")
data = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
try:
    model.fit(data, data[:, :1], batch_size=8, epochs=2, callbacks=[
        keras.callbacks.ModelCheckpoint("each.keras"),
    ])
except Exception:
    print("swallowed")
finally:
    print("after")
    model.save("last.keras")
"""

LOOPS = """
import keras
import numpy as np
import tensorflow as tf
from pathlib import Path

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD()
for step in range(5):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(np.ones((8, 4), "float32")))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
Path("train.py").unlink()
"""


@pytest.mark.slow
def test_a_script_trains_in_its_worker_and_goes_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost worker is replaced by another, which runs the script anew; it reads other settings."""
    project = Project(tmp_path, FITS, settings='{"units": 3}')
    monkeypatch.chdir(project.folder)
    with project.runner("--rate", "0.5") as runner:
        loaded = runner.load()
        line = project.line("model.fit")
        assert loaded.found == f"train.py:{line} Model.fit (Keras), batch 8, SGD"
        assert (loaded.framework, loaded.batch_size) == ("keras", 8)
        assert loaded.start_seconds > 0
        measured = runner.call("measure", recipe=Recipe(batch_size=16), seed=0, budget=QUICK)
        assert measured.samples_per_step == 16
        assert project.files() == project.before
        os.kill(runner.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerFailure) as lost:
            runner.call("describe", batch_size=8, seed=0)
        assert lost.value.kind is FailureKind.KILLED
        (project.folder / "settings").write_text('{"units": 5}')
        facts = runner.call("describe", batch_size=8, seed=0)
        assert facts.parameters == 4 * 5 + 5 + 5 + 1
        other = runner.load()
        assert other.fingerprint != loaded.fingerprint
        assert other.found == loaded.found
    assert project.started == 2
    assert project.files().keys() == project.before.keys()


def test_a_loop_of_its_own_ends_at_its_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path, LOOPS)
    monkeypatch.chdir(project.folder)
    with project.runner() as runner, pytest.raises(TaskError) as told:
        runner.load()
    line = project.line("apply_gradients")
    assert f"train.py:{line} makes an update in a loop of the script's own" in str(told.value)
    assert "`autoprec tune train.py:build`" in str(told.value)
    assert project.files() == project.before
