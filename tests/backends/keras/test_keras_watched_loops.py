"""Checks of Keras trainings of other shapes, in little memory, and of what cannot be checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from autoprec import apply_profile
from autoprec.backends.keras.watch import check as keras_check
from autoprec.backends.keras.watch.check import Check
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.watching import WatchedStep
from autoprec.errors import AutoprecWarning
from benchmarks.numerics.late_breaks import BFLOAT16
from benchmarks.numerics.late_breaks_keras import data

pytestmark = pytest.mark.keras

layers = keras.layers


def network(*inside: Any) -> Any:
    return keras.Sequential([layers.Input((8,)), layers.Dense(16), *inside, layers.Dense(2)])


def trained(
    model: Any,
    *,
    batch: int = 8,
    samples: int = 80,
    every: int = 4,
    watch: Any = "warn",
    **how: Any,
) -> Any:
    """Train by `fit` from given weights; return the precision."""
    model.compile(keras.optimizers.SGD(0.05), "mse", **how)
    precision = apply_profile(BFLOAT16, model=model, watch=watch, watch_every=every)
    model.fit(*data(samples), batch_size=batch, shuffle=False, verbose=0)
    return precision


def weights_of(model: Any) -> list[Any]:
    return [np.asarray(each) for each in model.weights]


class OwnStep(keras.Model):
    """A model whose training step is its own, with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = network()

    def call(self, given: Any) -> Any:
        return self.inside(given)

    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.abs(self(inputs, training=True) - targets))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("how", "checked"),
    [
        ({"jit_compile": True}, [1, 5, 9]),
        ({"run_eagerly": True}, [1, 5, 9]),
        ({"steps_per_execution": 3}, [1, 7, 13]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_step_that_is_compiled_otherwise_is_checked_and_trained_alike(
    how: dict[str, Any], checked: list[int]
) -> None:
    found = []
    for watch in ("warn", False):
        keras.utils.set_random_seed(0)
        model = network()
        found.append((trained(model, samples=120, watch=watch, **how), weights_of(model)))
    (precision, ours), (_, theirs) = found
    checks = precision.watched
    assert [each.updates for each in checks][:3] == checked
    assert all(each.samples == 8 and not each.problem for each in checks)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_training_step_of_the_models_own_is_checked_with_its_loss() -> None:
    precision = trained(OwnStep(), batch=16, every=2)
    checks = precision.watched
    assert [each.updates for each in checks] == [2, 4] or len(checks) == 3
    assert all(each.samples == 16 and 0.0 < abs(each.loss) < 0.02 for each in checks)
    assert all(0.0 < each.gradient < 0.5 for each in checks)


def test_a_layer_that_is_never_built_leaves_out_the_first_check_alone() -> None:
    class Spare(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.spare = network(), layers.Dense(3)

        def build(self, shape: Any) -> None:
            """Build nothing: one part is built, and the other is never called."""

        def call(self, given: Any) -> Any:
            return self.inside(given)

    precision = trained(Spare())
    assert [each.updates for each in precision.watched][:2] == [2, 6]
    assert all(each.samples for each in precision.watched)


@pytest.mark.parametrize(
    "strategy", [tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy]
)
def test_the_one_replica_of_a_strategy_is_checked_and_trained_alike(strategy: Any) -> None:
    found = []
    device = "/cpu:0" if strategy is tf.distribute.OneDeviceStrategy else ["/cpu:0"]
    for watch in ("warn", False):
        keras.utils.set_random_seed(0)
        with strategy(device).scope():
            model = network()
        precision = trained(model, watch=watch)
        found.append((precision, weights_of(model)))
    (precision, ours), (_, theirs) = found
    assert [each.samples for each in precision.watched] == [8, 8, 8]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


class SameShape(layers.Layer):
    """A layer that Keras need not call to know the shape of what it returns."""

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class Noisy(SameShape):
    """Adds numbers that `draw` gives, of the inputs' size."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.draw = draw

    def call(self, given: Any) -> Any:
        return given + 3 * ops.cast(self.draw(ops.shape(given)), given.dtype)


DRAWS = {
    "tensorflow": tf.random.normal,
    "keras": keras.random.normal,
    "numpy": lambda shape: np.random.normal(size=shape),
}


@pytest.mark.parametrize("library", DRAWS)
@pytest.mark.parametrize("seeded", [True, False])
def test_both_runs_draw_the_same_and_leave_what_is_drawn_next_as_it_was(
    library: str, seeded: bool
) -> None:
    def drawn_after_a_check(watch: Any) -> tuple[Any, list[float]]:
        keras.utils.set_random_seed(0)
        if not seeded:
            tf.random.set_seed(None)
        draw = DRAWS[library]
        draw((2,))  # as a script that has drawn before
        model = network(Noisy(draw))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        precision = apply_profile(BFLOAT16, model=model, watch=watch)
        precision.watch(*data(8))
        libraries = [name for name in DRAWS if seeded or name != "tensorflow"]
        return precision, [float(np.asarray(DRAWS[name]((1,)))[0]) for name in libraries]

    precision, following = drawn_after_a_check("raise")
    (check,) = precision.watched
    assert (check.samples, check.problem, check.not_checked) == (8, "", "")
    assert check.outputs < 0.05
    assert following == drawn_after_a_check(False)[1]


def test_a_step_that_cannot_be_repeated_is_not_judged() -> None:
    hidden = np.random.default_rng(0)
    model = network(Noisy(lambda shape: hidden.normal(size=shape)))
    with pytest.warns(AutoprecWarning, match="could not be made: the call cannot be repeated"):
        precision = trained(model, watch="raise", run_eagerly=True)
    assert not any(each.samples or each.problem for each in precision.watched)


def test_an_error_in_a_check_ends_no_training_and_is_told_once() -> None:
    class OnlyLow(SameShape):
        def call(self, given: Any) -> Any:
            if keras.backend.standardize_dtype(given.dtype) != "bfloat16":
                raise TypeError("16 bits only")
            return given

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", AutoprecWarning)
        precision = trained(network(OnlyLow()))
    checks = precision.watched
    assert [each.samples for each in checks] == [0, 0, 0]
    assert all("16 bits only" in each.not_checked for each in checks)
    (warning,) = [each for each in said if "could not be made" in str(each.message)]
    assert "update 1 in mixed_bfloat16" in str(warning.message)


def short_of_memory(most: int) -> Callable[..., Any]:
    real = keras_check.answered_step

    def step(model: Any, batch: Any, scale: float) -> Any:
        if len(batch[0]) > most:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
        return real(model, batch, scale)

    return step


def test_a_check_takes_as_many_samples_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras_check, "answered_step", short_of_memory(3))
    precision = trained(network())
    for check in precision.watched:
        assert (check.samples, check.batch) == (2, 8)
        assert check.not_checked == "of 8 samples 2 fit in memory"
        assert 0.0 < check.gradient < 0.5
    monkeypatch.setattr(keras_check, "answered_step", short_of_memory(0))
    with pytest.warns(AutoprecWarning, match="not enough memory for a second pass"):
        precision = trained(network())
    assert [each.samples for each in precision.watched] == [0, 0, 0]


def checked(
    model: Any, batch: Any, *, policy: Policy = Policy.MIXED_BFLOAT16
) -> tuple[Check, WatchedStep]:
    check = Check(model, batch, policy=policy, scale=1.0, floor=0.0)
    return check, check.made(WatchedStep(1))


@pytest.mark.parametrize("make", [network, OwnStep])
def test_what_samples_add_to_a_loss_tells_how_much_of_it_is_chance(make: Any) -> None:
    keras.utils.set_random_seed(0)
    model = make()
    model(data(32)[0])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    apply_profile(BFLOAT16, model=model, watch=False)
    inputs, targets = data(32)
    check, step = checked(model, (inputs, targets))
    low, exact = check._run(), check._exact
    assert exact is not None
    away = low.outputs.matrices[0] - exact.outputs.matrices[0]
    residual = exact.outputs.matrices[0] - np.asarray(targets)
    slope = np.sign(residual) / residual.size if make is OwnStep else residual * 2 / residual.size
    by_sample = (away * slope).sum(1)
    assert step.loss == pytest.approx(by_sample.sum() / exact.loss, rel=0.1, abs=1e-4)
    expected = by_sample.std(ddof=1) * len(by_sample) ** 0.5 / exact.loss
    assert check._difference(low).loss_error == pytest.approx(expected, rel=1e-3)
    check, _ = checked(model, (inputs[:8], targets[:8]))
    assert check._difference(low_of(check)).loss_error == 0.0  # too few


def low_of(check: Check) -> Any:
    return check._run()


def test_outputs_that_do_not_vary_count_by_their_size() -> None:
    """As those of a head that starts as its bias: what float32's rounding leaves is no scale."""
    model = network(layers.Dense(4, kernel_initializer="zeros"))
    model.layers[-1].set_weights([np.zeros((4, 2)), np.array([0.3, 0.7])])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    apply_profile(BFLOAT16, model=model, watch=False)
    _, step = checked(model, tuple(tf.constant(each) for each in data(16)))
    assert 1e-4 < step.outputs < 0.01
    assert not step.problem


def test_a_resumed_fit_goes_on_with_its_checks_and_its_mend() -> None:
    keras.utils.set_random_seed(0)
    precision = trained(network())
    state = precision.state_dict()
    assert [each.updates for each in precision.watched] == [1, 5, 9]
    state["watch"]["float32_modules"] = ["dense_of_it"]
    model = keras.Sequential([layers.Input((8,)), layers.Dense(2, name="dense_of_it")])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    other = apply_profile(BFLOAT16, model=model, watch_every=4)
    other.load_state_dict(state)
    assert other.watched == precision.watched
    assert model.layers[0].compute_dtype == "float32"
    model.fit(*data(80), batch_size=8, verbose=0)
    assert [each.updates for each in other.watched] == [1, 5, 9, 14, 18]
