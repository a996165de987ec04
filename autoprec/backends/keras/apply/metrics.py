"""Lets a compiled model's `metrics=` leave out the samples that `pad_dataset` added.

Keras gives weights to `weighted_metrics=` alone, so that a copy would count like any sample. What
was added bears a weight that no sample has, and the other metrics get weights of 1 and 0 by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from autoprec.backends.keras.apply.method_hooks import Hook

#: The weight of padding: it sums as 0 does, and its sign distinguishes it from a sample's own 0.
PADDING_WEIGHT = -0.0


class RealSamplesHook(Hook):
    """The `update_state` of all that a model was compiled with in `metrics=`."""

    def __init__(self, original: Callable[..., Any], metrics: Any) -> None:
        super().__init__(original)
        self.metrics = metrics

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Update each output's metrics with what is real among its samples."""
        if not self.metrics.built:
            self.metrics.build(y_true, y_pred)
        lists = self.metrics._flat_metrics
        weights = [] if sample_weight is None else self.metrics._flatten_y(sample_weight)
        weights = weights * len(lists) if len(weights) == 1 else weights
        given = [
            (found, weight)
            for found, weight in zip(lists, weights, strict=False)
            if found is not None and weight is not None
        ]
        for found, weight in given:
            vars(found)["update_state"] = _WeightedUpdateHook(
                found.update_state, _real_weights(weight)
            )
        try:
            self.original(y_true, y_pred, sample_weight)
        finally:
            for found, _ in given:
                vars(found).pop("update_state", None)


class _WeightedUpdateHook(Hook):
    """A metric's `update_state`, given the weights that its caller leaves out."""

    def __init__(self, original: Callable[..., Any], weights: Any) -> None:
        super().__init__(original)
        self.weights = weights

    def __call__(self, y_true: Any, y_pred: Any) -> None:
        """Update the metric."""
        self.original(y_true, y_pred, sample_weight=self.weights)


def _real_weights(weights: Any) -> Any:
    """Return 1 for a sample, 0 for padding."""
    import tensorflow as tf

    weights = tf.convert_to_tensor(weights)
    if weights.dtype != tf.float32:
        return tf.ones_like(weights, tf.float32)
    added = tf.bitcast(weights, tf.int32) == tf.int32.min
    return tf.where(added, 0.0, 1.0)


def hookable_metrics(model: Any) -> Any:
    """Return the compiled metrics whose updates can be changed; None where there are none."""
    if keras.config.backend() != "tensorflow":
        return None
    metrics = getattr(model, "_compile_metrics", None)
    return metrics if metrics is not None and metrics._user_metrics else None
