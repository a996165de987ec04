"""Cases of overflows, and of when and to what a recipe is applied, on two replicas."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.backends.keras.measure.session import KerasSession
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.backends.keras.trace.model_under_recipe import KerasTrainee
from autoprec.backends.keras.train.compiling import compile_obstacle
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Distributed, Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.errors import AutoprecWarning
from tests.backends.keras.keras_models import compiled, data, softmax_net
from tests.backends.keras.replicas.replica_pairs import (
    FLOAT16,
    assert_equal,
    case,
    mirrored,
    net,
    on,
    sgd,
)
from tests.backends.keras.replicas.replicas_in_loops import looped


def overflowing(samples: int = 32) -> tuple[Any, Any]:
    """Return data whose second replica overflows in the second batch of 16."""
    x, y = data(samples)
    x[24:32] = 1e6  # infinite in float16, whatever the weights are
    return x, y


@case
def a_skipped_step_leaves_the_moving_averages_of_all_replicas_as_they_were() -> None:
    section = Distributed(engine="mirrored", world_size=2)
    recipe = replace(FLOAT16, batch_size=8, distributed=section)
    x, y = overflowing()

    def normalised() -> Any:
        layers = keras.layers
        hidden = [layers.Input((8,)), layers.Dense(8), layers.BatchNormalization()]
        return compiled(keras.Sequential([*hidden, layers.Dense(4, activation="softmax")]))

    with mirrored().scope():
        model = normalised()
    precision = KerasSurgeon().apply(recipe, model=model)
    model.fit(x[:16], y[:16], 16, shuffle=False, verbose=0)
    before = model.get_weights()
    model.fit(x[16:], y[16:], 16, shuffle=False, verbose=0)
    assert precision.skipped == 1
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model.fit(x[:16], y[:16], 16, shuffle=False, verbose=0)
    assert all(np.isfinite(w).all() for w in model.get_weights())


@case
def an_overflow_on_one_replica_skips_the_step_on_all() -> None:
    section = Distributed(engine="mirrored", world_size=2)
    recipe = replace(FLOAT16, batch_size=8, distributed=section)
    x, y = overflowing()
    model, precision = on(mirrored(), recipe, net())
    model.fit(x[:16], y[:16], 16, shuffle=False, verbose=0)
    before = model.get_weights()
    model.fit(x[16:], y[16:], 16, shuffle=False, verbose=0)
    assert (precision.steps, precision.skipped, precision.scale) == (1, 1, 32.0)
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for variable in model.trainable_variables:  # the copies of both replicas
        one, two = variable.value.values
        np.testing.assert_array_equal(one.numpy(), two.numpy())


@case
def an_overflowing_micro_batch_is_left_out_on_all_replicas() -> None:
    section = Distributed(engine="mirrored", world_size=2)
    recipe = replace(FLOAT16, batch_size=8, accumulation_steps=2, distributed=section)
    x, y = overflowing(48)
    model, precision = on(mirrored(), recipe, net())
    model.fit(x, y, 16, shuffle=False, verbose=0)
    assert (precision.steps, precision.skipped) == (1, 1)
    clean, other = on(mirrored(), recipe, net())
    rest = np.r_[0:16, 32:48]
    clean.fit(x[rest], y[rest], 16, shuffle=False, verbose=0)
    assert (other.steps, other.skipped) == (1, 0)
    assert_equal(clean, model, atol=1e-3)


@case
def a_custom_loop_skips_an_overflow_of_one_replica_on_all() -> None:
    section = Distributed(engine="mirrored", world_size=2)
    recipe = replace(FLOAT16, batch_size=8, distributed=section)
    model, precision, _ = looped(recipe, mirrored(), *overflowing())
    assert (precision.steps, precision.skipped, precision.scale) == (1, 1, 32.0)
    for variable in model.trainable_variables:
        one, two = variable.value.values
        np.testing.assert_array_equal(one.numpy(), two.numpy())


@case
def broken_losses_are_counted_on_every_replica() -> None:
    x, y = data(32)
    weights = np.ones(32)
    weights[24] = np.nan
    model, precision = on(mirrored(), Recipe(batch_size=16), net())
    model.fit(x, y, 16, shuffle=False, sample_weight=weights, verbose=0)
    assert precision.nonfinite_losses == 1


@case
def what_the_number_of_replicas_changes_is_said_in_one_sentence() -> None:
    with mirrored().scope():
        model = net()()
    with pytest.warns(AutoprecWarning, match="1 replica is applied to 2 with batch_size 16"):
        precision = KerasSurgeon().apply(Recipe(batch_size=32), model=model)
    assert precision.recipe.distributed == Distributed(engine="mirrored", world_size=2)
    assert precision.warnings[0].endswith("the effective batch stays 32")
    section = Distributed(engine="mirrored", world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoprecWarning)
        KerasSurgeon().apply(Recipe(batch_size=8, distributed=section), model=model)
    with pytest.warns(AutoprecWarning, match="accumulation_steps 2 instead of 1"):
        precision = KerasSurgeon().apply(Recipe(batch_size=8, distributed=section), model=net()())
    assert (precision.global_batch_size, precision.recipe.world_size) == (8, 1)


@case
def a_profile_for_models_to_come_fits_the_replicas_of_each() -> None:
    precision = KerasSurgeon().apply(Recipe(policy=Policy.MIXED_BFLOAT16))
    with (
        mirrored().scope(),
        pytest.warns(AutoprecWarning, match="applied to 2 with batch_size 16 instead of 32"),
    ):
        model = net()()
    assert precision.global_batch_size == 32
    x, y = data(64)
    model.fit(x, y, precision.global_batch_size, verbose=0)
    assert (precision.steps, model.layers[0].compute_dtype) == (2, "bfloat16")
    precision.restore()


@case
def restoring_leaves_a_model_that_keras_trains_by_itself() -> None:
    recipe = replace(FLOAT16, batch_size=8, accumulation_steps=2)
    strategy = mirrored()
    model, precision = on(strategy, recipe, net(clipnorm=1.0))
    x, y = data(32)
    model.fit(x, y, 16, verbose=0)
    optimizer = precision.optimizer
    precision.restore()
    assert model.optimizer is not optimizer
    for name in ("_clip_gradients", "_all_reduce_sum_gradients", "scale_loss"):
        assert name not in vars(model.optimizer)
    assert "train_step" not in vars(model)
    before = model.get_weights()
    model.fit(x, y, 16, verbose=0)
    assert not np.array_equal(before[0], model.get_weights()[0])


@case
def off_gives_each_replica_its_part_of_the_batch() -> None:
    with mirrored().scope():
        model = net()()
    recipe = Recipe(batch_size=8, accumulation_steps=4)
    precision = KerasSurgeon().leave_unchanged(recipe, model=model)
    assert (precision.batch_size, precision.global_batch_size) == (16, 32)


@case
def a_strategy_of_one_replica_accumulates_too() -> None:
    recipe = replace(FLOAT16, batch_size=8, accumulation_steps=2)
    for strategy in (
        tf.distribute.MirroredStrategy(["CPU:0"]),
        tf.distribute.OneDeviceStrategy("CPU:0"),
    ):
        model, precision = on(strategy, recipe, net())
        x, y = data(40)
        model.fit(x, y, precision.global_batch_size, verbose=0)
        assert (precision.steps, precision.skipped) == (3, 0)


@case
def an_optimizer_wrapped_by_hand_updates_all_replicas() -> None:
    strategy = mirrored()
    with strategy.scope():
        model, optimizer = softmax_net(), sgd()
        optimizer.build(model.trainable_variables)
    section = Distributed(engine="mirrored", world_size=2)
    recipe = Recipe(batch_size=8, accumulation_steps=2, distributed=section)
    precision = KerasSurgeon().apply(recipe, model=model)
    wrapped = precision.wrap(optimizer)
    assert len(wrapped.accumulators[0].value.values) == 2


@case
def a_task_made_in_a_scope_is_measured_and_traced_on_its_replicas() -> None:
    def build() -> Any:
        with mirrored().scope():
            return net()()

    def quiet(phase: str, step: int) -> None:
        pass

    task = Task(name="task.py", build_model=build, build_data=lambda batch_size: data(64))
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=16, accumulation_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoprecWarning)
        session = KerasSession(task, recipe, device="cpu", seed=0, report=quiet)
        measured = session.time_steps(TimingBudget(seconds=0.2, min_steps=2, max_steps=3))
        session.close()
    assert measured.samples_per_step == 32
    assert measured.finite
    assert "several replicas" in compile_obstacle(build())
    batch = data(16)
    trainee = KerasTrainee(task, recipe, 0, batch, "cpu")
    loss, skipped = trainee.train_step(iter([(batch, 16), (batch, 16)]))
    assert trainee.precision.steps == 1
    assert np.isfinite(loss)
    assert not skipped
    trainee.close()


@case
def the_public_function_applies_and_is_switched_off() -> None:
    with mirrored().scope():
        model = net()()
    section = Distributed(engine="mirrored", world_size=2)
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8, distributed=section)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoprecWarning)
        with apply_profile(recipe, model=model, watch=False) as precision:
            model.fit(*data(32), precision.global_batch_size, verbose=0)
        assert precision.steps == 2
        off = apply_profile("off", model=model)
    assert (off.batch_size, off.global_batch_size) == (16, 32)  # of the default batch


@case
def a_profile_is_applied_inside_the_scope_as_well() -> None:
    with mirrored().scope():
        model = net()()
        section = Distributed(engine="mirrored", world_size=2)
        recipe = Recipe(batch_size=8, accumulation_steps=2, distributed=section)
        precision = KerasSurgeon().apply(recipe, model=model)
        model.fit(*data(48), precision.global_batch_size, verbose=0)
    assert precision.steps == 2  # the second of them with what was left
