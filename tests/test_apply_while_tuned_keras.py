"""apply_profile in a Keras task's own code changes nothing while a tuning measures the task."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from autoprec import Recipe, apply_profile
from autoprec.backends.shared import worker_process
from autoprec.core.dtypes import Policy
from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.task_source import TaskSource

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

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
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4, accumulation_steps=2)
    before = apply_profile(recipe)
    assert keras.config.dtype_policy().name == "float32"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    model.compile(optimizer, "mse")
    precision = apply_profile(recipe, model=model)
    assert (before.batch_size, precision.batch_size) == (8, 8)
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0)
    assert precision.optimizer is optimizer
    assert model.layers[-1].compute_dtype == "float32"
