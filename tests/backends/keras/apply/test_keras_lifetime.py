"""A recipe keeps no model alive: what the script drops is freed, undone or not."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from tests.backends.keras.keras_models import OwnTrainStep, compiled, data, softmax_net

FULL = Recipe(
    policy=Policy.MIXED_FLOAT16,
    loss_scale=LossScale(initial=64.0),
    accumulation_steps=2,
    float32_modules=("dense",),
)


def alive(references: list[Any]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def one(restore: bool, model: Any) -> Any:
    precision = KerasSurgeon().apply(FULL, model=model)
    x, y = data()
    model.fit(x, y, verbose=0)
    if restore:
        precision.restore()
    return [weakref.ref(model), weakref.ref(model.layers[0]), weakref.ref(model.optimizer)]


@pytest.mark.parametrize("restore", [True, False])
def test_models_the_script_drops_are_freed(restore: bool) -> None:
    adam = keras.optimizers.Adam()
    references = [
        *one(restore, softmax_net()),
        *one(restore, compiled(OwnTrainStep(), optimizer=adam)),
    ]
    del adam
    keras.utils.clear_session(free_memory=False)
    assert alive(references) == 0


def test_models_on_a_backbone_that_stays_are_freed() -> None:
    layers = keras.layers
    backbone = keras.Sequential([layers.Input((8,)), layers.Dense(8)])
    references = []
    for _ in range(3):
        model = compiled(keras.Sequential([layers.Input((8,)), backbone, layers.Dense(4)]))
        KerasSurgeon().apply(Recipe(policy=Policy.MIXED_BFLOAT16), model=model)
        model(data()[0])
        references += [weakref.ref(model), weakref.ref(model.optimizer)]
    del model
    keras.utils.clear_session(free_memory=False)
    assert alive(references) == 0
    backbone.add(layers.Dense(2, name="more"))


def test_folds_under_one_policy_are_freed_while_it_holds() -> None:
    references = []
    with KerasSurgeon().apply(FULL) as precision:
        for _ in range(2):
            model = softmax_net()
            x, y = data()
            model.fit(x, y, batch_size=8, verbose=0)
            references += [weakref.ref(model), weakref.ref(model.optimizer)]
            assert precision.steps == 2
        del model
        keras.utils.clear_session(free_memory=False)
        assert alive(references) == 0
        assert precision.optimizers == ()
        assert precision.model is None


def test_sessions_leave_nothing_behind() -> None:
    references: list[Any] = []

    def build() -> Any:
        model = softmax_net()
        references.extend((weakref.ref(model), weakref.ref(model.layers[1])))
        return model

    task = Task(name="task.py", build_model=build, build_data=lambda n: data(32))
    for recipe in (FULL, Recipe(batch_size=8), Recipe(policy=Policy.MIXED_BFLOAT16)):
        session = KerasBackend().open(task, recipe, device="cpu", seed=0, report=lambda *_: None)
        session.time_steps(TimingBudget(seconds=0.1, min_steps=2, max_steps=2))
        session.close()
        assert alive(references) == 0


def wide() -> Any:
    """25 MB of weights, and twice as much of Adam's averages."""
    layers = keras.layers
    hidden = [layers.Dense(2048), layers.Dense(2048)]
    model = keras.Sequential(
        [layers.Input((1024,)), *hidden, layers.Dense(4, activation="softmax")]
    )
    return compiled(model, optimizer=keras.optimizers.Adam())


def peak(task: Task, recipe: Recipe) -> int:
    session = KerasBackend().open(task, recipe, device="cpu", seed=0, report=lambda *_: None)
    measured = session.time_steps(TimingBudget(seconds=0.1, min_steps=2, max_steps=2))
    session.close()
    return measured.peak_memory_bytes


def test_a_recipes_peak_memory_does_not_depend_on_what_ran_before() -> None:
    batch = np.ones((64, 1024), "float32"), np.zeros(64, "int32")
    task = Task(
        name="task.py",
        build_model=wide,
        build_data=lambda n: [tuple(part[:n] for part in batch)],
    )
    small, large = Recipe(batch_size=8), Recipe(batch_size=64)
    # On a CPU the hidden layers' products take seconds for each sample in float16.
    every_part = replace(FULL, batch_size=2, float32_modules=("dense", "dense_1"))
    others = large, every_part
    first, second = ([peak(task, each) for each in (*others, small)][-1] for _ in range(2))
    assert second - first < 75 * 2**20, "one model and its optimizer are 75 MB"


def test_a_part_that_the_task_shares_between_its_models_is_left_alone() -> None:
    shared = keras.layers.Dense(8, name="shared")
    shared.build((None, 8))
    before = shared.kernel.numpy()

    def build() -> Any:
        inputs = keras.Input((8,))
        outputs = keras.layers.Dense(4, activation="softmax")(shared(inputs))
        return compiled(keras.Model(inputs, outputs), optimizer=keras.optimizers.SGD(0.0))

    task = Task(name="task.py", build_model=build, build_data=lambda n: data(32))
    for _ in range(2):
        peak(task, Recipe(batch_size=8))
        assert np.array_equal(shared.kernel.numpy(), before)
