"""Measures how large the numbers of a backward pass are, without float16 hardware.

bfloat16 has float32's range, so a tensor that is bfloat16 in a mixed_bfloat16 step would be float16
in a mixed_float16 one, and its largest magnitude says which loss scale it bears. Every bfloat16
tensor of the step's graph is read at loss scale 1 and 64: those that grew by exactly 64 belong to
the backward pass; weights and activations that pass through it did not grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from autoprec.backends.keras.apply.layer_names import LayerUnit, has_own_code, layer_units
from autoprec.backends.keras.measure.graph import (
    LayerCall,
    StepGraph,
    calls_recorded,
    is_backward,
    unrolled,
)
from autoprec.backends.keras.trace.trainee import Trainee, to_numpy
from autoprec.backends.keras.train.rng import same_in_every_dtype
from autoprec.backends.keras.train.task_runner import loss_and_gradients, on_tensorflow
from autoprec.core.dtypes import DType, Policy
from autoprec.core.numerics.records import ExponentHistogram, UnitTrace
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError

_GROWTH = 64.0


def in_bfloat16(recipe: Recipe) -> Recipe:
    """Return the recipe with bfloat16 where it has float16, uncompiled so it can be read."""
    return replace(recipe, policy=Policy.MIXED_BFLOAT16, loss_scale=None, compile=False)


@dataclass(frozen=True)
class _Reading:
    """The largest magnitude of each tensor that was read, and the weights' gradients."""

    largest: Any
    gradients: Sequence[Any]


class _Step:
    """A traced step that also returns the largest magnitude of its tensors."""

    def __init__(self, trainee: Trainee, batch: Any, dtypes: Sequence[str]) -> None:
        if not on_tensorflow():
            raise UsageError(
                "magnitudes of the backward pass are read from TensorFlow's graphs; Keras runs on "
                f"{keras.config.backend()!r} here: set KERAS_BACKEND=tensorflow for this"
            )
        self._trainee = trainee
        self._dtypes = frozenset(dtypes)
        self.units = layer_units(trainee.model)
        self.calls: list[LayerCall] = []
        self.names: list[str] = []
        self._run = self._trace(batch)

    def _trace(self, batch: Any) -> Callable[..., Any]:
        import tensorflow as tf

        def run(given: Any, scale: Any) -> Any:
            loss, gradients = loss_and_gradients(self._trainee.model, given, scale)
            del loss
            graph = tf.compat.v1.get_default_graph()
            read = [
                tensor
                for operation in graph.get_operations()
                for tensor in operation.outputs
                if tensor.dtype.name in self._dtypes and tensor.shape.num_elements() != 0
            ]
            self.names = [tensor.name for tensor in read]
            largest = [tf.reduce_max(tf.abs(tf.cast(tensor, tf.float32))) for tensor in read]
            return tf.stack(largest) if largest else tf.zeros((0,)), gradients

        compiled = tf.function(run, autograph=False)
        with calls_recorded(self.units, self.calls), unrolled(self.units), same_in_every_dtype():
            compiled.get_concrete_function(batch, tf.constant(1.0))
        return lambda given, scale: compiled(given, tf.constant(scale, tf.float32))

    def read(self, batch: Any, scale: float) -> _Reading:
        """Run the step once; the trainee's state stays as it is."""
        kept = self._trainee.take()
        largest, gradients = self._run(batch, scale)
        self._trainee.put_back(kept)
        return _Reading(to_numpy(largest), [to_numpy(g) for g in gradients])

    def backward(self, batch: Any) -> tuple[_Reading, Any]:
        """Return the reading at loss scale 1, and which of its tensors are of the backward pass."""
        once, more = self.read(batch, 1.0), self.read(batch, _GROWTH)
        grew = more.largest == once.largest * _GROWTH
        broken = ~np.isfinite(once.largest) & np.array([is_backward(n) for n in self.names], bool)
        return once, (grew & (once.largest > 0) & np.isfinite(once.largest)) | broken


@dataclass(frozen=True)
class Float16:
    """The largest float16 numbers of a step: see `ShadowPoint`, whose words these are."""

    forward: float | None = None
    overflowed: bool = False
    backward: float | None = None


class Watch:
    """Reads how large a step's float16 numbers are; `batch` is one like the others.

    The backward pass is read at the recipe's own loss scale, as float16 rounds it there, and once
    more far below: what did not shrink are weights and activations that pass through.
    """

    def __init__(self, trainee: Trainee, batch: Any) -> None:
        self._step = _Step(trainee, batch, ("float16",))
        self._scale = float(trainee.precision.scale)

    def read(self, batch: Any) -> Float16:
        """Read the largest forward and backward numbers; None where not finite or absent."""
        at_scale, below = (
            self._step.read(batch, scale).largest for scale in (self._scale, self._scale / _GROWTH)
        )
        behind = np.array([is_backward(name) for name in self._step.names], bool)
        forward, backward = _largest_of(at_scale[~behind]), None
        if np.isfinite(at_scale[behind]).all():
            grew = behind & (at_scale > below * math.sqrt(_GROWTH))
            backward = _largest_of(at_scale[grew])
        scaled = None if backward is None else backward / self._scale
        return Float16(forward, not np.isfinite(at_scale[~behind]).all(), scaled)


def _largest_of(found: Any) -> float | None:
    """Return the largest of some magnitudes; None where one is not finite, or there is none."""
    return float(found.max()) if found.size and np.isfinite(found).all() else None


class Exponents:
    """Gathers the exponents of backward passes over several batches."""

    def __init__(self) -> None:
        self._step: _Step | None = None
        self._shapes: Any = None
        self._largest: list[float] = []
        self._counts: dict[int, float] = {}
        self._batches = 0
        self._finite = True

    def add(self, trainee: Trainee, batch: Any) -> None:
        """Read the backward pass of one batch."""
        shapes = [tuple(leaf.shape) for leaf in keras.tree.flatten(batch)]
        if self._step is None or shapes != self._shapes:
            self._step, self._shapes = _Step(trainee, batch, ("bfloat16",)), shapes
        reading, backward = self._step.backward(batch)
        found = reading.largest[backward]
        self._batches += 1
        self._finite = self._finite and bool(np.isfinite(found).all())
        self._largest += [float(value) for value in found[np.isfinite(found)]]
        for exponent, share in _shares(reading.gradients).items():
            self._counts[exponent] = self._counts.get(exponent, 0.0) + share

    def histogram(self) -> ExponentHistogram:
        """Return the histogram of what was gathered; shares sum to one."""
        total = sum(self._counts.values()) or 1.0
        return ExponentHistogram(
            largest=max((exponent_of(value) for value in self._largest), default=None),
            smallest=min(self._counts, default=None),
            counts={str(e): share / total for e, share in sorted(self._counts.items())},
            batches=self._batches,
            finite=self._finite,
        )


def _shares(gradients: Sequence[Any]) -> dict[int, float]:
    """Return the shares of exponents, each gradient weighted by its share of the norm."""
    norms = [float(np.linalg.norm(g.astype(np.float64))) for g in gradients]
    total = sum(norm for norm in norms if math.isfinite(norm))
    shares: dict[int, float] = {}
    for gradient, norm in zip(gradients, norms, strict=True):
        if not math.isfinite(norm) or norm == 0.0:
            continue
        exponents = exponents_of(gradient)
        values, counts = np.unique(exponents, return_counts=True)
        for exponent, count in zip(values.tolist(), counts.tolist(), strict=True):
            share = norm / total * count / exponents.size
            shares[exponent] = shares.get(exponent, 0.0) + share
    return shares


def exponents_of(values: Any) -> Any:
    """Return floor(log2 |x|) of every finite, non-zero element."""
    flat = np.abs(values[np.isfinite(values) & (values != 0)]).astype(np.float64)
    return np.frexp(flat)[1] - 1


def exponent_of(value: float) -> int:
    """Return floor(log2 value) of a positive number."""
    return math.frexp(value)[1] - 1


def by_unit(trainee: Trainee, batch: Any, scale: float) -> tuple[UnitTrace, ...]:
    """Measure each unit's largest exponents, and its gradient's float16 underflow at `scale`.

    Forward it is the unit's own outputs, backward every tensor of its gradient.
    """
    step = _Step(trainee, batch, ("bfloat16", "float32"))
    reading, backward = step.backward(batch)
    graph = StepGraph((), step.calls)
    places = {name: index for index, name in enumerate(step.names)}
    gradients = dict(
        zip((id(v) for v in trainee.model.trainable_variables), reading.gradients, strict=False)
    )
    of_unit: dict[str, list[float]] = {}
    for index in np.flatnonzero(backward).tolist():
        path = graph.unit_of(step.names[index]) if is_backward(step.names[index]) else None
        if path is not None:
            of_unit.setdefault(path, []).append(float(reading.largest[index]))
    traces = []
    for unit in step.units:
        outputs = [
            float(reading.largest[places[tensor.name]])
            for call in step.calls
            if call.unit is unit
            for tensor in call.outputs
            if getattr(tensor, "name", None) in places
        ]
        if has_own_code(unit) and (outputs or unit.path in of_unit):
            traces.append(
                UnitTrace(
                    unit.path,
                    _largest(outputs),
                    _largest(of_unit.get(unit.path, [])),
                    _underflow(unit, gradients, scale),
                )
            )
    return tuple(traces)


def _largest(values: Sequence[float]) -> int | None:
    found = [exponent_of(value) for value in values if math.isfinite(value) and value > 0]
    return max(found, default=None)


def _underflow(unit: LayerUnit, gradients: dict[int, Any], scale: float) -> float:
    """Return the share of a unit's non-zero gradient that underflows in float16 at `scale`."""
    own = {id(v) for layer in unit.members for v in layer._trainable_variables}
    found = [exponents_of(gradients[key]) for key in own if key in gradients]
    exponents = np.concatenate(found) if found else np.zeros(0)
    if exponents.size == 0:
        return 0.0
    limits = DType.FLOAT16.limits
    smallest = limits.min_exponent - limits.mantissa_bits
    return float(np.mean(exponents + math.log2(scale) < smallest))
