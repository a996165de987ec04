"""tf.data batches padded to the device's alignment, with sample weights that say what is real.

Aligned sizes keep matrix products fast, and a last batch of full size keeps XLA from compiling
again. What was added has weight 0; compile the loss with `reduction="mean_with_sample_weight"`, so
that its mean is over what is real, and a padded batch trains exactly as the unpadded one:

    loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    model.compile(optimizer, loss)
    model.fit(pad_dataset(dataset, multiple=8))

BatchNormalization still sees the added samples; where that matters, drop the last batch instead.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

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
) -> Any:
    """Pad every batch of a tf.data.Dataset; return one of (inputs, targets, weights).

    `dataset` yields batches (inputs, targets) or (inputs, targets, weights), each a tensor or a
    nest of tensors with the samples first. The samples are padded to `multiple`, or to exactly
    `size`, by repeating the last one: zeros would be no likely input.

    With `sequences`, axis 1 of every input of rank 2 or more is padded with `value` to `multiple`,
    or to exactly `length`; with `target_sequences` the targets' too, with zeros, and the weights
    are of shape (batch, length): 0 where all of an input's position equals `value`, which is what
    `Embedding(mask_zero=True)` and `Masking` leave out too. Without it they are of shape (batch,).
    """
    if target_sequences and not sequences:
        raise UsageError("pad_dataset: target_sequences needs sequences=True as well")
    for name, number in (("multiple", multiple), ("size", size), ("length", length)):
        if number is not None and number < 1:
            raise UsageError(f"pad_dataset: {name}={number} given, expected 1 or more")

    def pad(inputs: Any, targets: Any, weights: Any = None) -> tuple[Any, Any, Any]:
        count = _count(inputs)
        weights = tf.ones([count]) if weights is None else tf.cast(weights, tf.float32)
        if sequences:
            inputs = _lengthen(inputs, multiple, length, value)
        if target_sequences:
            targets = _lengthen(targets, multiple, length, 0)
            weights = _by_position(weights, multiple, length) * _real(inputs, value)
        wanted = _aligned(count, multiple) if size is None else size
        inputs, targets, weights = tf.nest.map_structure(
            lambda tensor: _repeat_last(tensor, count, wanted, size), (inputs, targets, weights)
        )
        real = tf.cast(tf.range(wanted) < count, tf.float32)
        return inputs, targets, weights * (real[:, None] if target_sequences else real)

    return dataset.map(pad, num_parallel_calls=tf.data.AUTOTUNE)


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


def _by_position(weights: Any, multiple: int, length: int | None) -> Any:
    """Weights of shape (batch, 1), or those of (batch, length) padded like the targets."""
    if weights.shape.rank == 1:
        return weights[:, None]
    return _lengthen(weights, multiple, length, 0)


def _real(inputs: Any, value: float) -> Any:
    """1 where the first input's position differs from `value` anywhere, of (batch, length)."""
    first = tf.nest.flatten(inputs)[0]
    differs = tf.not_equal(first, tf.cast(value, first.dtype))
    axes = list(range(2, first.shape.rank))
    return tf.cast(tf.reduce_any(differs, axis=axes) if axes else differs, tf.float32)
