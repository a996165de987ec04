"""Too much memory and the user's mistakes, with Keras and TensorFlow in the worker.

Nothing here imports them: they run in the workers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autoprec import api
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.speed.trial_results import Status
from autoprec.tuning.events import Event, TrialFinished
from autoprec.tuning.options import Options
from autoprec.workers.failures import FailureKind, WorkerFailure

pytestmark = [
    pytest.mark.keras,
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's"),
]

MIB = 2**20
BUDGET = 2500 * MIB

#: A sample's activations take 7.5 MiB: a batch of 4096 would need 30 GiB.
GROWS = """
import os
os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np

def build_model():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(65536)(inputs)
    for _ in range(29):
        x = keras.layers.Activation("sigmoid")(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    return model

def build_data(batch_size):
    while True:
        yield np.ones((batch_size, 4), "float32"), np.zeros(batch_size, "int32")
"""


@pytest.fixture
def grows(tmp_path: Path) -> Path:
    path = tmp_path / "keras_task.py"
    path.write_text(GROWS)
    return path


@pytest.mark.slow  # TensorFlow waits ten seconds for memory that others might free
def test_a_batch_that_cannot_fit_is_out_of_memory(grows: Path, start: Any) -> None:
    worker = start(grows, memory_bytes=BUDGET)
    worker.load()
    with pytest.raises(WorkerFailure) as info:
        worker.call("measure", recipe=Recipe(batch_size=4096), seed=0, budget=TimingBudget())
    assert info.value.kind == FailureKind.OUT_OF_MEMORY


@pytest.mark.slow
@pytest.mark.release
def test_memory_that_grows_without_bound_is_tuned_within_the_budget(grows: Path) -> None:
    from autoprec.core.dtypes import Policy

    seen: list[TrialFinished] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished):
            seen.append(event)

    options = Options(
        policies=(Policy.FLOAT32,),
        batch_sizes=(8, 16, 1024, 4096),
        memory_bytes=BUDGET,
        rounds=1,
    )
    profile = api.tune(grows, options=options, listener=listen)
    outcomes = [event.outcome for event in seen]
    fine = {Status.OK, Status.OUT_OF_MEMORY, Status.WOULD_NOT_FIT}
    assert {outcome.status for outcome in outcomes} <= fine
    assert profile.evidence.chosen.peak_memory_bytes <= BUDGET
    assert profile.recipe.batch_size < 1024


def test_a_mistake_of_the_user_shows_their_frames(
    grows: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from autoprec.cli import main

    text = GROWS.replace("    inputs = keras.Input((4,))", "    inputs = keras.Imput((4,))")
    grows.write_text(text)
    assert main(["tune", str(grows), "--policies", "float32"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "in build_model" in err
    assert "Imput" in err.strip().splitlines()[-1]
    assert "Traceback (most recent call last)" not in err
