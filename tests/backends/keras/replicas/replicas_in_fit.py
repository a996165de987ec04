"""Cases of `fit` and `train_on_batch` on two replicas."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autoprec import apply_profile
from autoprec.backends.keras.apply.padded_batches import pad_dataset
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Alignment, Distributed, Recipe
from autoprec.errors import AutoprecWarning
from tests.backends.keras.keras_models import data, softmax_net
from tests.backends.keras.replicas.replica_pairs import (
    CountedReductions,
    assert_equal,
    both,
    case,
    fits_are_equal,
    mirrored,
    net,
    on,
    sgd,
    trained_alike,
)


@case
def fit_trains_like_one_process() -> None:
    _, precision = fits_are_equal(Recipe(batch_size=16), 48, net())
    assert (precision.batch_size, precision.global_batch_size) == (8, 16)
    assert repr(precision) == "Precision(float32, batch 16 on 2 replicas)"


@case
def an_uneven_last_batch_counts_every_sample_alike() -> None:
    pairs = both(Recipe(batch_size=16), net())
    for samples in (44, 42, 41, 37, 33):  # the last batch has 12, 10, 9, 5 and 1
        trained_alike(pairs, samples)


@case
def an_uneven_last_batch_with_regularisation() -> None:
    def build() -> Any:
        model = softmax_net(optimizer=sgd())
        model.layers[0].kernel_regularizer = keras.regularizers.L2(0.1)
        return model

    fits_are_equal(Recipe(batch_size=16), 37, build)


@case
def a_step_is_not_compiled_nor_are_several_taken_per_execution() -> None:
    recipe = Recipe(batch_size=16, compile=True, knobs={"steps_per_execution": 2})
    _, precision = fits_are_equal(recipe, 48, net())
    assert precision.model.steps_per_execution == 1
    assert any("steps_per_execution stays 1" in note for note in precision.warnings)
    assert not precision.model.jit_compile
    assert any(note.startswith("not compiled") for note in precision.warnings)


@case
def a_loss_that_is_a_sum_is_not_weighed() -> None:
    def build() -> Any:
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
        return softmax_net(optimizer=keras.optimizers.SGD(0.01), loss=loss)

    models = [model for model, precision in both(Recipe(batch_size=16), build)]
    x, y = data(44)
    for model in models:
        model.fit(x, y, 16, shuffle=False, verbose=0)
    assert_equal(*models)


@case
def padded_batches_train_like_unpadded_ones_in_one_process() -> None:
    def build() -> Any:
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
        return softmax_net(optimizer=sgd(), loss=loss)

    (one, _), (two, precision) = both(Recipe(batch_size=16), build)
    plain = tf.data.Dataset.from_tensor_slices(data(37)).batch(16)
    one.fit(plain, epochs=2, verbose=0)
    two.fit(pad_dataset(plain, size=precision.global_batch_size), epochs=2, verbose=0)
    assert_equal(one, two)


@case
def accumulation_that_spans_epochs_trains_like_one_process() -> None:
    recipe = Recipe(batch_size=8, accumulation_steps=4)
    one, two = fits_are_equal(recipe, 80, net())
    assert (one.recipe.accumulation_steps, two.recipe.accumulation_steps) == (4, 2)
    assert (two.global_batch_size, two.steps) == (16, 5)  # ten micro-batches by two


@case
def clipping_limits_the_gradient_of_the_whole_batch() -> None:
    for clip in ({"global_clipnorm": 0.05}, {"clipnorm": 0.05}, {"clipvalue": 0.01}):
        fits_are_equal(Recipe(batch_size=16), 64, net(**clip))
    fits_are_equal(Recipe(batch_size=8, accumulation_steps=4), 64, net(clipnorm=0.05))


@case
def gradients_are_reduced_once_for_each_update() -> None:
    for policy in (Policy.FLOAT32, Policy.MIXED_FLOAT16):
        for clip in ({}, {"clipnorm": 1.0}):
            reductions = CountedReductions()
            section = Distributed(engine="mirrored", world_size=2)
            recipe = Recipe(batch_size=4, accumulation_steps=4, distributed=section)
            devices = ["CPU:0", "CPU:1"]
            strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=reductions)
            model, precision = on(strategy, recipe.with_policy(policy), net(**clip))
            x, y = data(64)
            model.fit(x, y, precision.global_batch_size, verbose=0)
            assert precision.steps == 2
            assert int(reductions.count) == 2, (policy, clip, int(reductions.count))


@case
def train_on_batch_trains_like_one_process() -> None:
    x, y = data(16)
    (one, _), (two, _) = both(Recipe(batch_size=16), net())
    for _ in range(3):
        losses = [model.train_on_batch(x, y) for model in (one, two)]
        np.testing.assert_allclose(losses[0], losses[1], atol=1e-5)
    assert_equal(one, two)


@case
def mixed_precision_trains_like_mixed_precision_in_one_process() -> None:
    for policy in (Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16):
        for steps in (1, 2):
            recipe = Recipe(batch_size=16, accumulation_steps=steps).with_policy(policy)
            recipe = replace(recipe, batch_size=32 // steps)
            one, two = fits_are_equal(recipe, 96, net(), atol=2e-2)
            assert (two.steps, two.skipped) == (one.steps, 0) == (6, 0)


@case
def islands_and_padding_are_the_same_on_every_replica() -> None:
    def build() -> Any:
        return softmax_net(features=7, classes=3, optimizer=sgd())

    plain = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=16)
    names = [layer.name for layer in on(None, plain, build)[0].layers]
    keras.utils.clear_session(free_memory=False)
    names = [layer.name for layer in build().layers]
    keras.utils.clear_session(free_memory=False)
    recipe = replace(
        plain,
        float32_modules=(names[1],),
        alignment=Alignment(multiple=8, modules=(names[0], names[2])),
    )
    with mirrored().scope():
        model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoprecWarning)
        precision = KerasSurgeon().apply(recipe, model=model)
    assert [padded.path for padded in precision.report.padded] == [names[0], names[2]]
    assert precision.report.islands[0] == names[1]
    dtypes = [layer.compute_dtype for layer in model.layers]
    assert dtypes[:2] == ["bfloat16", "float32"]
    before = model.get_weights()
    x, y = data(32, features=7, classes=3)
    model.fit(x, y, precision.global_batch_size, verbose=0)
    assert not np.array_equal(before[0], model.get_weights()[0])
    assert [weight.shape for weight in before] == [w.shape for w in model.get_weights()]


@case
def what_several_replicas_train_is_said_to_be_unchecked() -> None:
    with mirrored().scope():
        model = softmax_net(optimizer=sgd())
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", AutoprecWarning)
        precision = apply_profile(recipe, model=model, watch_every=1)
        x, y = data(48)
        model.fit(x, y, precision.global_batch_size, verbose=0)
    unchecked = [
        each for each in said if "could not be made: several replicas" in str(each.message)
    ]
    assert len(unchecked) == 1
    assert [each.samples for each in precision.watched] == [0, 0, 0]
