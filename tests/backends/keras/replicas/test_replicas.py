"""A recipe on two replicas trains as it does in one process; the cases are in on_replicas."""

from __future__ import annotations

import json
import os
from pathlib import Path

import keras
import numpy as np
import pytest

from autoprec.backends.keras.apply.replicas import for_whole_batches, refuse_keras_distribution
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.recipe import Distributed, Recipe
from autoprec.errors import UsageError
from tests.backends.keras.replicas.on_replicas import CASES
from tests.fork_server import ForkServer

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def failures(forked: ForkServer) -> dict[str, str]:
    """Run every case in one process, whose two devices are set before TensorFlow starts."""
    # As many threads as TensorFlow wants: replicas wait for one another.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_NUM_")}
    done = forked.run(HERE / "on_replicas.py", seconds=900, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.scale
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", CASES)
def test_two_replicas(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


def test_a_keras_distribution_is_refused():
    mesh = keras.distribution.DeviceMesh((1,), ["batch"], np.array(["cpu:0"]))
    keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
    try:
        with pytest.raises(UsageError, match=r"DataParallel is set.*MirroredStrategy"):
            KerasSurgeon().apply(Recipe())
    finally:
        keras.distribution.set_distribution(None)
    refuse_keras_distribution()


def test_a_task_without_replicas_keeps_its_recipe():
    recipe = Recipe(batch_size=32, accumulation_steps=2)
    assert for_whole_batches(recipe, object()) is recipe


def test_a_task_with_replicas_shares_its_batches():
    class Strategy:
        num_replicas_in_sync = 4

    class Model:
        _distribute_strategy = Strategy()

    shared = for_whole_batches(Recipe(batch_size=32, accumulation_steps=2), Model())
    assert (shared.batch_size, shared.accumulation_steps) == (8, 2)
    assert shared.distributed == Distributed(engine="mirrored", world_size=4)
    alone = for_whole_batches(Recipe(batch_size=4), Model())
    assert alone.batch_size == 1
    with pytest.raises(UsageError, match=r"a batch of 3 given for 4 replicas"):
        for_whole_batches(Recipe(batch_size=3), Model())
