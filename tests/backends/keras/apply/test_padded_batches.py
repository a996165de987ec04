"""Padded tf.data batches: what is added has no weight, and training does not notice it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.backends.keras.apply.padded_batches import pad_dataset
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError

LOSS = keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction="mean_with_sample_weight"
)


def batches(count: int, size: int, features: int = 5) -> tuple[np.ndarray, np.ndarray, Any]:
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, features)).astype("float32")
    y = rng.integers(3, size=count)
    return x, y, tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def classifier() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss=LOSS, run_eagerly=True)
    return model


def texts(lengths: list[int]) -> Any:
    """A batch of token sequences with a label for every token; 0 is padding."""
    rng = np.random.default_rng(len(lengths))

    def generate() -> Any:
        for length in lengths:
            tokens = rng.integers(1, 20, size=length)
            yield tokens, tokens % 3

    signature = (tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None,), tf.int64))
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    return tf.data.Dataset.from_tensors(next(iter(dataset.padded_batch(len(lengths)))))


def tagger(mask_zero: bool) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((None,)),
            keras.layers.Embedding(20, 6, mask_zero=mask_zero),
            keras.layers.GRU(7, return_sequences=True),
            keras.layers.Dense(3),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss=LOSS, run_eagerly=True)
    return model


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 16))
def test_real_samples_keep_their_place_and_weight(count: int, size: int, multiple: int) -> None:
    x, y, dataset = batches(count, size)
    seen = 0
    for inputs, targets, weights in pad_dataset(dataset, multiple=multiple):
        real = int(weights.numpy().sum())
        assert len(inputs) == len(targets) == len(weights)
        assert len(inputs) % multiple == 0
        assert len(inputs) - real < multiple
        np.testing.assert_array_equal(weights, np.arange(len(inputs)) < real)
        np.testing.assert_array_equal(inputs[:real], x[seen : seen + real])
        np.testing.assert_array_equal(targets[:real], y[seen : seen + real])
        np.testing.assert_array_equal(
            inputs[real:], np.repeat(x[[seen + real - 1]], len(inputs) - real, 0)
        )
        seen += real
    assert seen == count


def test_a_padded_batch_trains_as_the_unpadded_one() -> None:
    _, _, dataset = batches(13, 5)
    plain, padded = classifier(), classifier()
    padding = pad_dataset(dataset, size=8)
    first = plain.fit(dataset, epochs=2, verbose=0, shuffle=False).history["loss"]
    second = padded.fit(padding, epochs=2, verbose=0, shuffle=False).history["loss"]
    # Keras weighs its mean over an epoch by the batches' sizes, so only the weights must agree.
    assert len(first) == len(second) == 2
    for left, right in zip(plain.get_weights(), padded.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask_zero", [True, False])
def test_padded_sequences_train_as_the_unpadded_ones(mask_zero: bool) -> None:
    dataset = texts([3, 9, 5])
    keyed = {"sequences": True, "target_sequences": True}
    plain, padded = tagger(mask_zero), tagger(mask_zero)
    for _ in range(2):
        # multiple=1 adds nothing: the weights alone leave out what padded_batch added.
        (x, y, w) = next(iter(pad_dataset(dataset, multiple=1, **keyed)))
        (px, py, pw) = next(iter(pad_dataset(dataset, multiple=8, **keyed)))
        assert (x.shape, px.shape) == ((3, 9), (8, 16))
        assert pw.numpy().sum() == w.numpy().sum() == 17
        one = plain.train_on_batch(x, y, sample_weight=w)
        other = padded.train_on_batch(px, py, sample_weight=pw)
        assert one == pytest.approx(other, rel=1e-5)
    for left, right in zip(plain.get_weights(), padded.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def test_the_users_weights_are_kept() -> None:
    x, y, _ = batches(3, 3)
    given_weights = np.array([0.5, 2.0, 1.0], "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y, given_weights)).batch(3)
    _, _, weights = next(iter(pad_dataset(dataset, multiple=4)))
    np.testing.assert_array_equal(weights, [0.5, 2.0, 1.0, 0.0])


def test_nests_are_padded_whole_and_sizes_are_static() -> None:
    inputs = {"image": tf.ones([3, 4, 4, 1]), "text": tf.ones([3, 5], tf.int32)}
    dataset = tf.data.Dataset.from_tensors((inputs, tf.zeros([3])))
    padded = pad_dataset(dataset, size=8, sequences=True, length=16)
    assert padded.element_spec[0]["text"].shape == (8, 16)
    (found, targets, weights) = next(iter(padded))
    assert found["image"].shape == (8, 16, 4, 1)
    assert (targets.shape, weights.shape) == ((8,), (8,))


def test_a_batch_larger_than_the_size_is_an_error() -> None:
    _, _, dataset = batches(5, 5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="more samples than size=4"):
        list(pad_dataset(dataset, size=4))


@pytest.mark.parametrize(
    "wrong", [{"multiple": 0}, {"size": -1}, {"length": 0}, {"target_sequences": True}]
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    _, _, dataset = batches(2, 2)
    with pytest.raises(UsageError, match="pad_dataset"):
        pad_dataset(dataset, **wrong)


def test_weighted_metrics_count_what_is_real_and_class_weights_weigh() -> None:
    x, y, dataset = batches(13, 13)
    weights = {0: 3.0, 2: 0.5}

    def trained(how: Any, **fit: Any) -> Any:
        model = classifier()
        model.compile(
            keras.optimizers.SGD(0.5), LOSS, weighted_metrics=["accuracy"], run_eagerly=True
        )
        history = model.fit(how, verbose=0, shuffle=False, **fit).history
        return history["accuracy"][0], model.get_weights()

    plain, _ = trained(dataset)
    padded, after = trained(pad_dataset(dataset, multiple=8))
    assert padded == pytest.approx(plain, rel=1e-6)
    weighed, by_fit = trained(dataset, class_weight=weights)
    again, by_padding = trained(pad_dataset(dataset, multiple=8, class_weight=weights))
    assert again == pytest.approx(weighed, rel=1e-6)
    for one, other, third in zip(by_fit, by_padding, after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert not np.allclose(one, third)
    hot = tf.data.Dataset.from_tensors((x, tf.one_hot(y, 3)))
    (_, _, found) = next(iter(pad_dataset(hot, multiple=8, class_weight=weights)))
    expected = np.array([3.0, 1.0, 0.5])[y]
    np.testing.assert_allclose(found.numpy(), [*expected, 0, 0, 0])


def test_weights_by_output_stay_by_output() -> None:
    x = tf.ones([3, 2])
    targets = {"a": tf.zeros([3]), "b": tf.zeros([3, 4])}
    given_weights = {"a": tf.constant([1.0, 2.0, 3.0]), "b": tf.constant([0.5, 0.5, 1.0])}
    dataset = tf.data.Dataset.from_tensors((x, targets, given_weights))
    (_, _, weights) = next(iter(pad_dataset(dataset, multiple=4)))
    np.testing.assert_array_equal(weights["a"], [1, 2, 3, 0])
    np.testing.assert_array_equal(weights["b"], [0.5, 0.5, 1, 0])


def test_the_sequence_is_found_behind_a_first_input_that_is_none() -> None:
    inputs = {"author": tf.constant([4, 5]), "text": tf.constant([[7, 8, 0], [9, 0, 0]])}
    dataset = tf.data.Dataset.from_tensors((inputs, tf.ones([2, 3])))
    padded = pad_dataset(dataset, multiple=4, sequences=True, target_sequences=True)
    (_, _, weights) = next(iter(padded))
    np.testing.assert_array_equal(weights, [[1, 1, 0, 0], [1, 0, 0, 0], [0] * 4, [0] * 4])
    flat = tf.data.Dataset.from_tensors((tf.constant([4, 5]), tf.ones([2, 3])))
    with pytest.raises(UsageError, match="rank 2 or more"):
        pad_dataset(flat, sequences=True, target_sequences=True)


@pytest.mark.parametrize("own_weights", [False, True])
def test_metrics_of_a_model_with_a_recipe_leave_out_what_was_added(own_weights: bool) -> None:
    x, y, dataset = batches(13, 5)
    if own_weights:  # a sample's own 0 counts, as Keras counts it
        rows = x, y, (np.arange(13) % 2).astype("float32")
        dataset = tf.data.Dataset.from_tensor_slices(rows).batch(5)
    found = {}
    for padded in (False, True):
        model = classifier()
        model.compile(keras.optimizers.SGD(0.0), LOSS, metrics=["accuracy"])
        with KerasSurgeon().apply(Recipe(), model=model):
            data = pad_dataset(dataset, size=8) if padded else dataset
            history = model.fit(data, verbose=0, shuffle=False).history
            found[padded] = history["accuracy"], model.evaluate(data, verbose=0)[1:]
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-6)
    assert found[True][1] == pytest.approx(found[False][1], rel=1e-6)
    assert "update_state" not in vars(model._compile_metrics)


def test_metrics_of_padded_sequences_leave_out_what_was_added() -> None:
    keyed = {"sequences": True, "target_sequences": True}
    found = []
    for multiple in (1, 8):
        model = tagger(mask_zero=True)
        model.compile("sgd", LOSS, metrics=["accuracy"], run_eagerly=True)
        KerasSurgeon().apply(Recipe(), model=model)
        data = pad_dataset(texts([3, 9, 5]), multiple=multiple, **keyed)
        found.append(model.evaluate(data, verbose=0)[1])
    (x, y), *_ = texts([3, 9, 5])
    right = tagger(mask_zero=True)(x).numpy().argmax(-1) == y.numpy()
    assert found == pytest.approx([right[x.numpy() > 0].mean()] * 2)


def test_metrics_of_the_users_own_weights_are_kerass() -> None:
    (x, y), *_ = texts([3, 9, 5])
    found = []
    for recipe in (False, True):
        model = tagger(mask_zero=True)
        model.compile("sgd", LOSS, metrics=["accuracy"], run_eagerly=True)
        if recipe:
            KerasSurgeon().apply(Recipe(), model=model)
        found.append(model.evaluate(x, y, sample_weight=np.ones(x.shape, "float32"), verbose=0)[1])
    assert found[0] == pytest.approx(found[1])


def test_metrics_of_one_output_alone_may_have_weights() -> None:
    inputs = keras.Input((5,))
    model = keras.Model(inputs, [keras.layers.Dense(3)(inputs), keras.layers.Dense(3)(inputs)])
    model.compile("sgd", [LOSS, LOSS], metrics=[["accuracy"], ["accuracy"]])
    x, y, _ = batches(4, 4)
    weights = tf.constant([1.0, 0.0, -0.0, -0.0])
    with KerasSurgeon().apply(Recipe(), model=model):
        outputs = model(x)
        updated = model.compute_metrics(x, [y, y], outputs, [weights, None])
        found = [float(value) for name, value in updated.items() if "accuracy" in name]
    right = [np.asarray(output).argmax(-1) == y for output in outputs]
    assert found == pytest.approx([right[0][:2].mean(), right[1].mean()])
