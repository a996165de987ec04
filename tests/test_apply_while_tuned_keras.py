"""apply_profile in a Keras task's own code changes nothing while a tuning measures the task."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import Recipe, apply_profile
from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.protocol import Task
from autoprec.backends.shared import worker_process
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale
from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.task_source import TaskSource

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SPLIT = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4, accumulation_steps=2)

TRAIN = """
import keras, numpy as np
from autoprec import apply_profile

def make_model():
    apply_profile("not_yet.profile.yaml")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    apply_profile("not_yet.profile.yaml", model=model)
    return model
"""

TASK = """
import numpy as np
from train import make_model as build_model

def build_data(batch_size):
    random = np.random.default_rng(0)
    return [(random.normal(size=(batch_size, 4)), np.ones((batch_size, 1))) for _ in range(4)]
"""


@pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")
def test_a_recipe_that_is_measured_is_the_one_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "model_k.py").write_text(textwrap.dedent(TASK))
    monkeypatch.chdir(tmp_path)
    worker = Worker(WorkerSettings(TaskSource(tmp_path / "model_k.py")))

    def losses(recipe: Recipe) -> Any:
        return worker.call("trajectory", recipe=recipe, seed=0, steps=3).losses

    try:
        assert any("changes nothing" in note for note in worker.load().notes)
        plain = losses(Recipe(batch_size=8))
        rounded = losses(Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8))
        assert rounded != plain
        assert rounded == pytest.approx(plain, rel=0.05)
    finally:
        worker.close()


def test_it_stands_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(worker_process.WORKER, "1")
    monkeypatch.setattr(worker_process, "_NOTES", {})
    before = apply_profile(SPLIT)
    assert keras.config.dtype_policy().name == "float32"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    model.compile(optimizer, "mse")
    precision = apply_profile(SPLIT, model=model)
    assert (before.batch_size, precision.batch_size) == (8, 8)
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0)
    assert precision.optimizer is optimizer
    assert model.layers[-1].compute_dtype == "float32"


class Net(keras.Model):
    """Takes a step of its own by what `apply_profile` gave the script."""

    def __init__(self, precision: Any) -> None:
        super().__init__()
        self.hidden, self.head = keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)
        self.precision = precision

    def call(self, x: Any) -> Any:
        return self.head(self.hidden(x))

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
            scaled = self.precision().scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.precision().apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("form", ["for all models", "for the model"])
def test_a_step_by_the_scripts_own_precision_is_the_measured_recipes(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(worker_process.WORKER, "1")
    monkeypatch.setattr(worker_process, "_NOTES", {})
    held = [apply_profile(SPLIT)]

    def build_model() -> Any:
        model = Net(lambda: held[-1])
        optimizer = keras.optimizers.SGD()
        model.compile(optimizer, "mse")
        if form == "for the model":
            held.append(apply_profile(SPLIT, model=model, optimizer=optimizer))
        return model

    def build_data(batch_size: int) -> Any:
        draws = np.random.default_rng(0)
        x = draws.normal(size=(64, 4)).astype("float32")
        return x, x[:, :1] * 3

    task = Task(name="task.py", build_model=build_model, build_data=build_data)
    tracer = KerasBackend().tracer(task, device="cpu", seed=0, report=lambda *_: None)
    losses = tracer.reference(batch_size=8, steps=4, checkpoints=(0, 2)).losses
    assert len(set(losses)) == 4
    scaled = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale(initial=64.0))
    for point in tracer.compare_steps(recipe=scaled):
        assert point.gradient_seen
        assert 0 < point.gradient_error < 0.05
    trained = tracer.trajectory(recipe=scaled, seed=0, steps=4)
    assert trained.losses == pytest.approx(losses, rel=0.02)
    assert trained.losses != losses
    for precision in held:
        precision.restore()


@pytest.mark.parametrize("switch", [worker_process.WORKER, "AUTOPREC"])
def test_attaching_a_model_changes_nothing_while_profiles_change_nothing(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch, "1" if switch == worker_process.WORKER else "off")
    monkeypatch.setattr(worker_process, "_NOTES", {})
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with apply_profile(SPLIT) as precision:
        assert precision.attach(model) is precision
        model.fit(np.ones((16, 4)), np.ones((16, 1)), batch_size=8, verbose=0)
        assert precision.model is model
        assert precision.steps == 2
        assert model.layers[-1].compute_dtype == "float32"
