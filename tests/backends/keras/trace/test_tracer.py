"""Traces compare a recipe with float32 from the same state, and read a backward pass's range."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.trace.model_under_recipe import KerasTrainee
from autoprec.backends.protocol import Task
from autoprec.backends.shared import checkpoint
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import UsageError
from tests.backends.keras.keras_models import OwnTrainStep, compiled, data, softmax_net

FLOAT32 = Recipe(batch_size=8)
BF16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)


def with_dropout():
    return compiled(
        keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dropout(0.5),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(4, activation="softmax"),
            ]
        )
    )


def tracer(build_model=softmax_net, build_data=lambda n: data(64), seed=0, **more):
    given = Task(name="task.py", build_model=build_model, build_data=build_data, **more)
    return KerasBackend().tracer(given, device="cpu", seed=seed, report=lambda *_: None)


def eager_tracer(build_model=softmax_net, **more):
    """Of models whose few steps run without a graph, whose making takes longer than they do."""

    def build():
        model = build_model()
        model.run_eagerly = True
        return model

    return tracer(build, **more)


@pytest.mark.parametrize("model", [with_dropout, lambda: compiled(OwnTrainStep())])
def test_float32_compared_with_itself_is_equal(model):
    traced = tracer(model)
    reference = traced.reference(batch_size=8, steps=4, checkpoints=(0, 3))
    assert reference.finite
    assert len(reference.losses) == 4
    assert reference.reproducible
    points = traced.compare_steps(recipe=FLOAT32)
    assert [point.step for point in points] == [0, 3]
    for point in points:
        assert point.loss == pytest.approx(point.reference, rel=1e-6)
        assert point.gradient_error < 1e-5
    again = traced.trajectory(recipe=FLOAT32, seed=0, steps=4)
    assert again.losses == pytest.approx(reference.losses, rel=1e-6)


def test_steps_of_a_larger_batch_are_compared_at_the_weights_of_a_smaller_one():
    traced = eager_tracer(with_dropout)
    run = traced.reference(batch_size=4, steps=4, checkpoints=(0, 3), compared_batch=16)
    small = traced.trajectory(recipe=Recipe(batch_size=4), seed=0, steps=4)
    assert small.losses == pytest.approx(run.losses, rel=1e-6)
    for point in traced.compare_steps(recipe=Recipe(batch_size=16)):
        assert point.loss == pytest.approx(point.reference, rel=1e-6)
        assert point.gradient_error < 1e-5
        assert point.reference != pytest.approx(run.losses[point.step], rel=1e-3)


def test_bfloat16_deviates_a_little_and_noise_is_its_measure():
    traced = eager_tracer(with_dropout)
    traced.reference(batch_size=8, steps=3, checkpoints=(0, 2))
    compared = traced.compare_steps(recipe=BF16)
    assert [point.step for point in compared] == [0, 2]
    assert all(0 < point.gradient_error < 0.2 for point in compared)
    noise = traced.noise(draws=2)
    assert [point.step for point in noise] == [0, 0, 2, 2]
    assert all(point.loss != point.reference for point in noise)
    assert len({point.loss for point in noise}) == 4


def test_late_losses_are_averaged_over_further_batches_at_the_same_weights():
    traced = tracer()
    traced.reference(batch_size=8, steps=62, checkpoints=(59, 60, 61))
    first, *late = traced.compare_steps(recipe=BF16)
    assert (first.mean_loss, first.mean_reference) == (None, None)
    stream = traced._stream(8, 0)
    model = softmax_net()
    for point, kept in zip(late, traced._checkpoints[1:], strict=True):
        model.set_weights(kept.state[: len(model.weights)])
        losses = []
        for index in range(32):
            x, y = stream.batch(index)
            losses.append(float(keras.ops.mean(model.compute_loss(x, y, model(x)))))
        assert point.mean_reference == pytest.approx(np.mean(losses), rel=1e-5)
        assert point.mean_loss == pytest.approx(point.mean_reference, rel=1e-2)
        assert point.mean_loss != point.mean_reference


def test_noise_and_seeds_change_a_trajectory_and_repeats_do_not():
    traced = eager_tracer(with_dropout)
    first, same, noisy, other = (
        traced.trajectory(recipe=FLOAT32, seed=seed, steps=3, noisy=noise).losses
        for seed, noise in ((1, False), (1, False), (1, True), (2, False))
    )
    assert first == same
    assert first != noisy
    assert first == pytest.approx(noisy, rel=0.05)
    assert first != other


def test_float16_trajectories_report_skips_and_scales():
    recipe = Recipe(
        policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=2.0**40)
    )
    run = eager_tracer().trajectory(recipe=recipe, seed=0, steps=3)
    assert run.skipped == (0, 1, 2)
    assert run.scales == (2.0**39, 2.0**38, 2.0**37)
    tuned = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=2.0**10))
    traced = eager_tracer()
    traced.reference(batch_size=8, steps=1, checkpoints=(0,))
    (point,) = traced.compare_steps(recipe=tuned)
    assert point.gradient_error < 0.02


def test_a_trajectory_with_accumulation_averages_its_micro_batches():
    traced = eager_tracer()
    whole = traced.trajectory(recipe=Recipe(batch_size=16), seed=0, steps=3)
    halves = traced.trajectory(recipe=Recipe(batch_size=8, accumulation_steps=2), seed=0, steps=3)
    assert halves.losses == pytest.approx(whole.losses, rel=1e-5)


def test_a_run_ends_when_its_time_is_up_and_evaluate_is_asked():
    traced = eager_tracer(evaluate=lambda model: 0.5)
    run = traced.trajectory(recipe=FLOAT32, seed=0, steps=1000, seconds=0.5)
    assert 0 < len(run.losses) < 1000
    assert run.metric == 0.5


def test_comparing_needs_a_reference():
    with pytest.raises(UsageError, match="reference"):
        eager_tracer().compare_steps(recipe=BF16)


def test_a_tracers_seed_changes_weights():
    def losses(build_data, seed):
        traced = eager_tracer(build_data=build_data, seed=seed)
        run = traced.reference(batch_size=8, steps=2, checkpoints=(0,))
        (point,) = traced.compare_steps(recipe=FLOAT32)
        assert point.loss == pytest.approx(run.losses[0], rel=1e-6)
        return run.losses

    same_data = lambda n: data(64)  # noqa: E731
    assert losses(same_data, 0) == losses(same_data, 0)
    assert losses(same_data, 0) != losses(same_data, 1000)  # other weights


def test_a_large_model_keeps_the_checkpoints_that_there_is_memory_for(monkeypatch):
    traced = eager_tracer()
    traced.reference(batch_size=8, steps=4, checkpoints=(0, 1, 3))
    assert [point.step for point in traced.compare_steps(recipe=FLOAT32)] == [0, 1, 3]
    size = sum(value.nbytes for value in traced._checkpoints[0].state)
    monkeypatch.setattr(checkpoint, "MAX_CHECKPOINT_BYTES", 4 * size)
    traced.reference(batch_size=8, steps=4, checkpoints=(0, 1, 3))
    assert [point.step for point in traced.compare_steps(recipe=FLOAT32)] == [0, 3]


def test_no_model_is_kept_when_a_trace_ends_or_fails(monkeypatch):
    closed = []
    close = KerasTrainee.close
    monkeypatch.setattr(KerasTrainee, "close", lambda self: (close(self), closed.append(self)))
    built = []
    build = KerasTrainee.__init__
    monkeypatch.setattr(
        KerasTrainee, "__init__", lambda self, *args: (built.append(self), build(self, *args))[1]
    )

    def fail(model):
        raise RuntimeError("the user's own")

    traced = eager_tracer(evaluate=fail)
    with pytest.raises(RuntimeError, match="own"):
        traced.reference(batch_size=8, steps=2, checkpoints=(0, 1))
    assert built == closed
    traced.noise(draws=1)
    traced.compare_steps(recipe=BF16)
    traced.backward_exponents(recipe=BF16, batches=1)
    traced.unit_magnitudes(recipe=BF16)
    assert built == closed
    assert len(built) == 5  # one of each: float32 answers while it trains


def test_a_model_that_is_built_differently_each_time_still_starts_the_same():
    random = np.random.default_rng(0)  # of the task file's own: no seed reaches it

    def build():
        model = softmax_net()
        model.set_weights([random.normal(size=w.shape) for w in model.get_weights()])
        return model

    traced = eager_tracer(build)
    first, again, other = (
        traced.trajectory(recipe=FLOAT32, seed=seed, steps=3).losses for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_a_layer_that_models_share_starts_each_run_untrained():
    shared = keras.layers.Dense(8, activation="tanh")

    def build():
        layers = [keras.layers.Input((8,)), shared, keras.layers.Dense(4, activation="softmax")]
        return compiled(keras.Sequential(layers))

    traced = eager_tracer(build)
    losses = [traced.trajectory(recipe=FLOAT32, seed=0, steps=3).losses for _ in range(2)]
    assert losses[0] == losses[1]


def test_scales_are_told_where_a_model_holds_its_optimizers_itself():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)
            self.own = keras.optimizers.SGD(0.01)

        def call(self, x):
            return self.dense(x)

        def train_step(self, batch):
            import tensorflow as tf

            x, _ = batch
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(keras.ops.cast(self(x), "float32")))
                scaled = self.own.scale_loss(loss)
            variables = self.trainable_variables
            self.own.apply(tape.gradient(scaled, variables), variables)
            return {"loss": loss}

    def build():
        model = Own()
        model.compile(optimizer=None, loss="sparse_categorical_crossentropy")
        return model

    recipe = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale(initial=2.0**10))
    run = eager_tracer(build).trajectory(recipe=recipe, seed=0, steps=2)
    assert run.scales == (2.0**10, 2.0**10)


def test_batches_of_another_size_are_forgotten():
    traced = eager_tracer()
    for size in (8, 4):
        traced.reference(batch_size=size, steps=1, checkpoints=())
        assert list(traced._streams) == [(size, 0)]


class LooksAtValues(OwnTrainStep):
    """Its step has no graph, and so is run eagerly."""

    def train_step(self, given):
        if float(keras.ops.sum(given[0]).numpy()) > 1e9:
            return {"loss": 0.0}
        return super().train_step(given)


def test_a_step_without_a_graph_is_compared_in_float16():
    traced = eager_tracer(lambda: compiled(LooksAtValues()))
    traced.reference(batch_size=8, steps=2, checkpoints=(0,))
    recipe = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale(initial=64.0))
    (point,) = traced.compare_steps(recipe=recipe)
    assert 0 < point.gradient_error < 0.05
    assert point.largest is None
