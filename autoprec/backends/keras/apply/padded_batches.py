"""tf.data batches padded to the device's alignment, with sample weights that say what is real.

Aligned sizes keep matrix products fast, and a last batch of full size keeps XLA from compiling
again. What was added has weight 0; compile the loss with `reduction="mean_with_sample_weight"`, so
that its mean is over what is real, and a padded batch trains exactly as the unpadded one:

    loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    model.compile(optimizer, loss, weighted_metrics=["accuracy"])
    model.fit(pad_dataset(dataset, multiple=8))

A model with a recipe leaves the copies out of `metrics=` too. Keras itself gives those no weights:
in a model without a recipe they count the copies, and metrics belong into `weighted_metrics=`.
BatchNormalization still sees the added samples; where that matters, drop the last batch instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from autoprec.backends.keras.apply.metrics import PADDING_WEIGHT
from autoprec.errors import UsageError


def pad_dataset(
    dataset: Any,
    *,
    multiple: int = 8,
    size: int | None = None,
    sequences: bool = False,
    target_sequences: bool = False,
    length: int | None = None,
    value: float = 0,
    class_weight: Mapping[int, float] | None = None,
) -> Any:
    """Pad every batch of a tf.data.Dataset; return one of (inputs, targets, weights).

    `dataset` yields batches (inputs, targets) or (inputs, targets, weights), each a tensor or a
    nest of tensors with the samples first; weights by output stay by output. The samples are
    padded to `multiple`, or to exactly `size`, by repeating the last one: zeros would be no likely
    input.

    With `sequences`, axis 1 of every input of rank 2 or more is padded with `value` to `multiple`,
    or to exactly `length`; with `target_sequences` the targets' too, with zeros, and the weights
    are of shape (batch, length): 0 where all of an input's position equals `value`, which is what
    `Embedding(mask_zero=True)` and `Masking` leave out too. Without it they are of shape (batch,).
    The input that is looked at is the first one of rank 2 or more.

    `class_weight` weighs samples by their class, as `fit(class_weight=...)` does, which takes no
    batches that have weights.
    """
    if target_sequences and not sequences:
        raise UsageError("pad_dataset: target_sequences needs sequences=True as well")
    for name, number in (("multiple", multiple), ("size", size), ("length", length)):
        if number is not None and number < 1:
            raise UsageError(f"pad_dataset: {name}={number} given, expected 1 or more")

    def pad(inputs: Any, targets: Any, weights: Any = None) -> tuple[Any, Any, Any]:
        count = _count(inputs)
        if weights is None:
            weights = tf.ones([count])
        weights = tf.nest.map_structure(lambda tensor: tf.cast(tensor, tf.float32), weights)
        if class_weight:
            weights = _map_weights(
                weights, lambda each: each * _class_weights(targets, each, class_weight)
            )
        if sequences:
            inputs = _lengthen(inputs, multiple, length, value)
        if target_sequences:
            targets = _lengthen(targets, multiple, length, 0)
            real_positions = _real_positions(inputs, value)
            weights = _map_weights(
                weights,
                lambda each: _zero_padding(
                    _position_weights(each, multiple, length), real_positions
                ),
            )
        wanted = _aligned(count, multiple) if size is None else size
        return _pad_samples((inputs, targets, weights), count, wanted, size)

    return dataset.map(pad, num_parallel_calls=tf.data.AUTOTUNE)


def _pad_samples(
    batch: tuple[Any, Any, Any], count: Any, wanted: Any, size: int | None
) -> tuple[Any, Any, Any]:
    """Repeat the last of `count` samples until there are as many as wanted, with weights of 0."""
    inputs, targets, weights = tf.nest.map_structure(
        lambda tensor: _repeat_last(tensor, count, wanted, size), batch
    )
    real = tf.range(wanted) < count
    weights = _map_weights(weights, lambda each: _zero_padding(each, _in_rank_of(real, each)))
    return inputs, targets, weights


def _map_weights(weights: Any, change: Callable[[Any], Any]) -> Any:
    return tf.nest.map_structure(change, weights)


def _zero_padding(weights: Any, real: Any) -> Any:
    """Keep the weights of real samples; the rest get a zero that the metrics hook knows."""
    return tf.where(real, weights, tf.constant(PADDING_WEIGHT, tf.float32))


def _in_rank_of(real: Any, weights: Any) -> Any:
    """Reshape one boolean per sample to the rank of its weights."""
    return tf.reshape(real, [-1, *[1] * (weights.shape.rank - 1)])


def _class_weights(targets: Any, weights: Any, class_weight: Mapping[int, float]) -> Any:
    """Look up the weight of each target's class; targets are class numbers or one-hot."""
    if tf.nest.is_nested(targets):
        raise UsageError("pad_dataset: class_weight needs one output, as in fit")
    classes = targets
    if targets.shape.rank is not None and targets.shape.rank > weights.shape.rank:
        last = targets.shape[-1]
        classes = targets[..., 0] if last == 1 else tf.argmax(targets, axis=-1)
    table = [float(class_weight.get(index, 1.0)) for index in range(max(class_weight) + 1)]
    classes = tf.cast(classes, tf.int32)
    known = tf.gather(table, tf.minimum(classes, len(table) - 1))
    return tf.where(classes < len(table), known, 1.0)


def _count(inputs: Any) -> Any:
    return tf.shape(tf.nest.flatten(inputs)[0])[0]


def _aligned(number: Any, multiple: int) -> Any:
    return (number + multiple - 1) // multiple * multiple


def _repeat_last(tensor: Any, count: Any, wanted: Any, size: int | None) -> Any:
    """Add copies of the last sample; more than `size` samples are an error at run time."""
    enough = tf.debugging.assert_less_equal(
        count, wanted, message=f"pad_dataset: a batch holds more samples than size={size}"
    )
    with tf.control_dependencies([enough] if enough is not None else []):
        more = tf.repeat(tensor[-1:], wanted - count, axis=0)
    padded = tf.concat([tensor, more], axis=0)
    padded.set_shape([size, *tensor.shape[1:]])
    return padded


def _lengthen(nest: Any, multiple: int, length: int | None, value: float) -> Any:
    def grow(tensor: Any) -> Any:
        if tensor.shape.rank is None or tensor.shape.rank < 2:
            return tensor
        now = tf.shape(tensor)[1]
        wanted = _aligned(now, multiple) if length is None else length
        paddings = [[0, 0], [0, wanted - now], *([[0, 0]] * (tensor.shape.rank - 2))]
        padded = tf.pad(tensor, paddings, constant_values=tf.cast(value, tensor.dtype))
        padded.set_shape([tensor.shape[0], length, *tensor.shape[2:]])
        return padded

    return tf.nest.map_structure(grow, nest)


def _position_weights(weights: Any, multiple: int, length: int | None) -> Any:
    """Return weights of shape (batch, 1), or those of (batch, length) padded like targets."""
    if weights.shape.rank == 1:
        return weights[:, None]
    return _lengthen(weights, multiple, length, 0)


def _real_positions(inputs: Any, value: float) -> Any:
    """Mark where the first sequence differs from `value`; shape (batch, length)."""
    found = [tensor for tensor in tf.nest.flatten(inputs) if (tensor.shape.rank or 0) >= 2]
    if not found:
        raise UsageError(
            "pad_dataset: target_sequences needs an input of rank 2 or more, (batch, length, ...)"
        )
    first = found[0]
    differs = tf.not_equal(first, tf.cast(value, first.dtype))
    axes = list(range(2, first.shape.rank))
    return tf.reduce_any(differs, axis=axes) if axes else differs
