"""Every Keras task file builds compiled, gives the batches it is asked for, and trains."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pytest

from autoprec import Policy, Recipe
from tests.fork_server import ForkServer

FOLDER = Path(__file__).parent.parent / "examples" / "keras"
TASKS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.name.startswith("train_"))

#: A step of this network takes a second, traced or not.
LARGE = "mobilenet_v2"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=TASKS)
def task(request: pytest.FixtureRequest) -> ModuleType:
    return loaded(request.param)


@pytest.mark.parametrize("batch_size", [8, 24])
def test_data_has_the_batch_asked_for(task: ModuleType, batch_size: int) -> None:
    for images, classes in task.build_data(batch_size).take(3):
        assert images.shape[0] == classes.shape[0] == batch_size
        assert images.dtype == "float32"


def test_data_is_the_same_under_the_same_seed(task: ModuleType) -> None:
    runs = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        runs.append([images.numpy() for images, _ in task.build_data(8).take(3)])
    for images, images_again in zip(*runs, strict=True):
        np.testing.assert_array_equal(images, images_again)


@pytest.mark.parametrize(
    "name",
    [pytest.param(t, marks=pytest.mark.release) if t == LARGE else t for t in TASKS],
)
def test_the_model_is_compiled_and_its_loss_falls_in_plain_float32(name: str) -> None:
    task = loaded(name)
    keras.utils.set_random_seed(0)
    model = task.build_model()
    model.run_eagerly = True  # to trace MobileNet's step takes longer than to run it
    assert model.compiled
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    images, classes = next(iter(task.build_data(16)))
    losses = [float(model.train_on_batch(images, classes)[0]) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert 0.0 <= task.evaluate(model) <= 1.0


def test_the_output_is_float32_in_a_mixed_policy(task: ModuleType) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = task.build_model()
    finally:
        keras.config.set_dtype_policy(before)
    assert {output.dtype for output in model.outputs} == {"float32"}
    assert "bfloat16" in {layer.compute_dtype for layer in model.layers}


@pytest.mark.release  # what they call is tested in this process
@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("train_fit.py", ["--epochs", "2", "--steps", "2"], "tuned"),
        ("train_custom_loop.py", ["--steps", "2"], "steps skipped for overflow: 0"),
    ],
)
def test_a_training_script_runs(
    script: str,
    arguments: list[str],
    expected: str,
    write_profile: Callable[[Recipe, str], Path],
    forked: ForkServer,
) -> None:
    profile = write_profile(Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=16), "keras")
    child = forked.run(FOLDER / script, "--profile", profile, *arguments)
    assert child.returncode == 0, child.stderr
    assert "recipe: mixed_bfloat16 at batch 16" in child.stdout
    assert expected in child.stdout
