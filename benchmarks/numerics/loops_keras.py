"""Loops written by hand: what becomes of a Keras task without autoprec, under Keras's policies.

The truth of a task must not come from the code that is judged by it. Here Keras's global dtype
policy is set before the model is built, as its guide to mixed precision does, its own scaler scales
the loss, and the steps are the model's train_step, without XLA.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autoprec.backends.protocol import Task
from autoprec.core.numerics.traces import Trajectory

POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
NOISE = 2.0**-9

HIGHEST, SEARCHED, BELOW = 2.0**60, 150, 16.0
"""A loss scale is looked for from `HIGHEST` down for `SEARCHED` steps; a run begins `BELOW` times
below the one that is left."""


class Loop:
    """Trains one task under one policy, a seed each, from that seed's own first weights.

    The steps of a run are one loop in one graph, so that eight seeds are traced once.
    """

    def __init__(self, task: Task, policy: str) -> None:
        self._task, self._policy = task, policy
        self._model = self._built(0)
        for optimizer in (self._model.optimizer, getattr(self._scaler, "inner_optimizer", None)):
            if optimizer is not None and not optimizer.built:
                optimizer.build(self._model.trainable_variables)
        self._rested = [keras.ops.convert_to_numpy(v) for v in self._model.optimizer.variables]
        self._run = tf.function(self._steps, autograph=False)

    def train(
        self, *, seed: int, steps: int, batch: int, scale: float = 1.0, noisy: bool = False
    ) -> Trajectory:
        """Train as Keras's `fit` does, but for XLA."""
        fresh = self._built(seed)
        if noisy:
            _perturb(fresh, seed)
        _assign(_state(self._model), _state(fresh))
        _assign(self._model.optimizer.variables, self._rested)
        if self._scaler is not None:
            self._scaler.dynamic_scale.assign(scale)
        keras.utils.set_random_seed(seed)
        taken = list(itertools.islice(_endless(self._task, batch), steps))
        data = keras.tree.map_structure(lambda *leaves: tf.constant(np.stack(leaves)), *taken)
        losses, scales = (tensor.numpy().tolist() for tensor in self._run(data))
        halved = [step for step in range(steps) if scales[step] < [scale, *scales][step]]
        known = tuple(loss if math.isfinite(loss) else None for loss in losses)
        return Trajectory(known, tuple(halved), tuple(scales), seed=seed)

    @property
    def _scaler(self) -> Any:
        return self._model.optimizer if self._policy == "float16" else None

    def _built(self, seed: int) -> keras.Model:
        with _global_policy(self._policy):
            keras.utils.set_random_seed(seed)
            return self._task.build_model()

    def _steps(self, data: Any) -> tuple[Any, Any]:
        """Every step's loss before its update, and the loss scale after it."""
        steps = keras.tree.flatten(data)[0].shape[0]

        def step(index: Any, losses: Any, scales: Any) -> Any:
            self._model.reset_metrics()
            batch = keras.tree.map_structure(lambda leaf: leaf[index], data)
            with _global_policy(self._policy):
                loss = self._model.train_step(batch)["loss"]
            scale = 1.0 if self._scaler is None else self._scaler.dynamic_scale
            scale = tf.convert_to_tensor(scale, tf.float32)
            return (
                index + 1,
                losses.write(index, tf.cast(loss, tf.float32)),
                scales.write(index, scale),
            )

        empty = (tf.TensorArray(tf.float32, steps) for _ in range(2))
        _, losses, scales = tf.while_loop(lambda i, *_: i < steps, step, (0, *empty))
        return losses.stack(), scales.stack()


def scale_by_hand(loop: Loop, batch: int) -> float:
    """Let Keras's own scaler halve a scale that is too high until steps pass; stay well below."""
    return loop.train(seed=0, steps=SEARCHED, batch=batch, scale=HIGHEST).scales[-1] / BELOW


def _endless(task: Task, batch: int) -> Iterator[Any]:
    for _ in itertools.count():
        for each in task.build_data(batch):
            yield tuple(each)


def _state(model: keras.Model) -> list[Any]:
    """Weights, statistics and the seeds of random layers; no metrics."""
    metrics = {id(variable) for metric in model.metrics for variable in metric.variables}
    return [variable for variable in model.variables if id(variable) not in metrics]


def _assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


@contextlib.contextmanager
def _global_policy(policy: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(POLICIES.get(policy, "float32"))
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _perturb(model: keras.Model, seed: int) -> None:
    """Multiply every weight by 1 + uniform(-2**-9, 2**-9)."""
    random = np.random.default_rng(7919 + seed)
    for weight in model.trainable_variables:
        value = keras.ops.convert_to_numpy(weight)
        noise = random.uniform(-NOISE, NOISE, value.shape)
        weight.assign((value * (1 + noise)).astype(value.dtype))
