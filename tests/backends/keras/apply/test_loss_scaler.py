"""Loss scaling skips exactly the overflowing steps, and its state survives a checkpoint."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.keras.apply import optimizer_wrapping
from autoprec.backends.keras.apply.checkpoints import convert_keras_file, restore_checkpoint
from autoprec.backends.keras.apply.loss_scaler import ScaledOptimizer
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import AutoprecWarning
from tests.backends.keras.keras_models import compiled, data, softmax_net

SCALE = LossScale(initial=1024.0, growth_interval=3)


def fp16(**scale):
    given = {"initial": 1024.0, "growth_interval": 3, **scale}
    return Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(**given))


def apply(recipe, model, **arguments):
    return KerasSurgeon().apply(recipe, model=model, **arguments)


def with_adam():
    return softmax_net(optimizer=keras.optimizers.Adam(1e-2))


def planted(steps, overflowing, features=8):
    """Batches of which some overflow float16 in the forward pass: 1e4 x 16 inputs."""
    x, y = data(8 * steps, features)
    batches = []
    for step in range(steps):
        inputs = x[8 * step : 8 * step + 8].copy()
        if step in overflowing:
            inputs[:] = 6e4
        batches.append((inputs, y[8 * step : 8 * step + 8]))
    return batches


def loop(model, precision, batches):
    """A hand-written GradientTape loop; returns which steps changed the weights."""
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    changed = []
    for x, y in batches:
        with tf.GradientTape() as tape:
            scaled = precision.scale_loss(loss_fn(y, model(x, training=True)))
        gradients = tape.gradient(scaled, model.trainable_variables)
        before = [v.numpy() for v in model.trainable_variables]
        answer = precision.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        really = any(
            not np.array_equal(a, v.numpy())
            for a, v in zip(before, model.trainable_variables, strict=True)
        )
        assert answer is really
        changed.append(answer)
    return changed


def test_a_loop_skips_exactly_the_overflowing_steps_and_halves_each_time():
    model = softmax_net()
    precision = apply(fp16(growth_interval=100), model)
    changed = loop(model, precision, planted(8, {2, 5, 6}))
    assert [step for step, answer in enumerate(changed) if not answer] == [2, 5, 6]
    assert precision.scale == 1024.0 / 8
    assert (precision.steps, precision.skipped) == (5, 3)


def test_the_scale_doubles_after_the_growth_interval_and_counting_starts_again():
    model = softmax_net()
    precision = apply(fp16(), model)
    scales = []
    for batch in planted(8, {4}):
        loop(model, precision, [batch])
        scales.append(precision.scale)
    assert scales == [1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048]


def test_a_fixed_scale_skips_but_never_changes():
    model = softmax_net()
    precision = apply(fp16(mode="fixed"), model)
    assert loop(model, precision, planted(6, {1}))[1] is False
    assert precision.scale == 1024.0
    assert precision.skipped == 1


def test_the_floor_holds_and_a_warning_names_the_step():
    model = softmax_net()
    precision = apply(fp16(initial=8.0, floor=2.0), model)
    with pytest.warns(AutoprecWarning, match=r"floor of 2, .* at step 4.* and a lower floor helps"):
        loop(model, precision, planted(6, {1, 2, 3, 4}))
    assert precision.scale == 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoprecWarning)
        precision.check()


def test_a_step_whose_scale_falls_to_the_floor_is_no_sign_that_a_lower_one_overflows():
    model = softmax_net()
    precision = apply(fp16(initial=8.0, floor=2.0), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoprecWarning)
        loop(model, precision, planted(3, {1, 2}))
        precision.check()
    assert precision.scale == 2.0


def test_the_warning_at_the_smallest_scale_offers_no_lower_floor():
    smallest = 2.0**-24
    model = softmax_net()
    precision = apply(fp16(initial=smallest, floor=smallest), model)
    with pytest.warns(AutoprecWarning, match="forward pass overflows") as caught:
        loop(model, precision, planted(1, {0}))
    assert "lower floor" not in str(caught[0].message)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_skips_the_same_steps_and_warns_at_the_floor(jit_compile):
    model = softmax_net()
    recipe = Recipe(
        policy=Policy.MIXED_FLOAT16,
        loss_scale=LossScale(initial=8.0, floor=2.0),
        compile=jit_compile,
    )
    precision = apply(recipe, model)
    batches = planted(6, {1, 2, 3, 4})
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=(tf.TensorSpec((8, 8)), tf.TensorSpec((8,), tf.int64)),
    )
    with pytest.warns(AutoprecWarning, match="at step 4"):
        model.fit(dataset, verbose=0, steps_per_epoch=6, shuffle=False)
    assert (precision.steps, precision.skipped, precision.scale) == (2, 4, 2.0)


@pytest.mark.parametrize("form", ["keras", "checkpoint", "state_dict"])
def test_a_run_resumes_with_identical_scale_counter_weights_and_counts(form, tmp_path):
    batches = planted(10, {3, 7})
    whole = with_adam()
    initial = whole.get_weights()
    straight = apply(fp16(), whole)
    loop(whole, straight, batches)

    first = with_adam()
    first.set_weights(initial)
    before = apply(fp16(), first)
    loop(first, before, batches[:5])
    if form == "keras":
        first.save(tmp_path / "m.keras")
        second = keras.saving.load_model(tmp_path / "m.keras")
        after = apply(fp16(), second)
        after.load_state_dict(before.state_dict())  # the file itself is that of a plain model
    else:
        path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(tmp_path / "c")
        second = with_adam()
        after = apply(fp16(), second)
        second.optimizer.build(second.trainable_variables)
        status = tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(path)
        status.assert_existing_objects_matched()
        if form == "state_dict":
            after.load_state_dict(before.state_dict())
    assert after.scale == before.scale
    assert after.state_dict() == before.state_dict()
    assert after.skipped == 1
    loop(second, after, batches[5:])
    assert after.state_dict() == straight.state_dict()
    for mine, theirs in zip(second.weights, whole.weights, strict=True):
        assert np.array_equal(mine.numpy(), theirs.numpy())
    for mine, theirs in zip(second.optimizer.variables, whole.optimizer.variables, strict=True):
        assert np.array_equal(np.asarray(mine.numpy()), np.asarray(theirs.numpy()))


def trained():
    """A model after one update, made without tracing a step."""
    model = with_adam()
    variables = model.trainable_variables
    model.optimizer.apply([keras.ops.cos(variable) for variable in variables], variables)
    return model


def states_equal(one, other):
    inner = [getattr(o, "inner_optimizer", o) for o in (one.optimizer, other.optimizer)]
    pairs = zip(one.weights + inner[0].variables, other.weights + inner[1].variables, strict=True)
    return all(np.array_equal(np.asarray(a.numpy()), np.asarray(b.numpy())) for a, b in pairs)


def test_keras_files_convert_both_ways(tmp_path):
    model = trained()
    model.save(tmp_path / "plain.keras")
    convert_keras_file(tmp_path / "plain.keras", tmp_path / "scaled.keras", scale=SCALE)
    scaled = keras.saving.load_model(tmp_path / "scaled.keras")
    assert type(scaled.optimizer) is keras.optimizers.LossScaleOptimizer
    assert scaled.optimizer.initial_scale == SCALE.initial
    assert states_equal(model, scaled)
    convert_keras_file(tmp_path / "scaled.keras", tmp_path / "back.keras", scale=None)
    back = keras.saving.load_model(tmp_path / "back.keras")
    assert type(back.optimizer) is keras.optimizers.Adam
    assert states_equal(model, back)


def test_kerass_own_wrapper_converts_with_its_scale(tmp_path):
    model = compiled(
        softmax_net(),
        optimizer=keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(), initial_scale=64.0, dynamic_growth_steps=2
        ),
    )
    x, y = data(64)
    model.fit(x, y, verbose=0, batch_size=32)
    assert float(model.optimizer.dynamic_scale.numpy()) == 128.0
    model.save(tmp_path / "a.keras")
    convert_keras_file(tmp_path / "a.keras", tmp_path / "b.keras", scale=SCALE)
    assert (
        float(keras.saving.load_model(tmp_path / "b.keras").optimizer.dynamic_scale.numpy()) == 128
    )


@pytest.mark.parametrize("names", [("model", "optimizer"), ("model",)])
@pytest.mark.parametrize("direction", ["plain to scaled", "scaled to plain"])
def test_tensorflow_checkpoints_restore_across_wrappers(names, direction, tmp_path):
    saved, restored = trained(), with_adam()
    scaled = saved if direction == "scaled to plain" else restored
    scaled.optimizer = optimizer_wrapping.wrap(scaled.optimizer, SCALE, 1)
    for model in (saved, restored):
        model.optimizer.build(model.trainable_variables)

    def objects(model):
        return {n: model if n == "model" else model.optimizer for n in names}

    path = tf.train.Checkpoint(**objects(saved)).save(tmp_path / "c")
    status = restore_checkpoint(path, **objects(restored))
    status.expect_partial()
    assert states_equal(saved, restored)


def test_the_scale_has_a_ceiling():
    optimizer = ScaledOptimizer(keras.optimizers.SGD(0.0), 2.0**126, dynamic_growth_steps=1)
    variable = keras.Variable(1.0)
    optimizer.scale_loss(keras.ops.ones(()))
    optimizer.apply([keras.ops.ones(())], [variable])
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**126


def test_everything_is_counted(caplog):
    model = softmax_net()
    precision = apply(fp16(floor=512.0), model)
    with caplog.at_level("INFO", logger="autoprec"), pytest.warns(AutoprecWarning):
        loop(model, precision, planted(8, {0, 1, 5}))
    counts = precision.counts
    assert (counts.steps, counts.skipped) == (5, 3)
    assert (counts.scale_drops, counts.scale_growths, counts.floor_hits) == (2, 1, 1)
    assert counts.nonfinite_losses == precision.nonfinite_losses == 3
    assert "3 steps skipped so far" in caplog.text


def test_losses_that_are_not_finite_are_counted_in_fit_without_a_loss_scale():
    # No relu: oneDNN's bfloat16 kernels turn relu(NaN) into 0 on CPUs that have bfloat16.
    layers = [keras.layers.Input((8,)), keras.layers.Dense(4, activation="softmax")]
    model = compiled(keras.Sequential(layers), optimizer=keras.optimizers.SGD(0.0))
    precision = apply(Recipe(policy=Policy.MIXED_BFLOAT16), model)
    x, y = data()
    x[9] = np.nan
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    assert precision.counts.nonfinite_losses == 3  # the weights are NaN from then on
