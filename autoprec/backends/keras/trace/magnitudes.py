"""Reads how large the numbers of a step are from its TensorFlow graph.

Every tensor of the wanted dtypes is reduced to its largest magnitude inside the graph; what belongs
to the backward pass is told by two loss scales (see `autoprec.backends.shared.gradient_exponents`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np

from autoprec.backends.keras.apply.layer_names import LayerUnit, has_own_code, layer_units
from autoprec.backends.keras.devices import on_tensorflow
from autoprec.backends.keras.measure.step_graph import (
    LayerCall,
    StepGraph,
    calls_recorded,
    is_backward,
    unrolled,
)
from autoprec.backends.keras.train.data import to_numpy
from autoprec.backends.keras.train.rng import same_in_every_dtype
from autoprec.backends.keras.train.task_runner import loss_and_gradients
from autoprec.backends.shared.gradient_exponents import (
    SCALE_FACTOR,
    largest_exponent,
    least_float16_exponent,
    weighted_shares,
)
from autoprec.backends.shared.tracer import Float16Magnitudes
from autoprec.core.numerics.traces import UnitTrace
from autoprec.errors import UsageError


class TracedModel(Protocol):
    """What is read: a model, whose state is put back afterwards."""

    model: Any

    def take_state(self) -> Any:
        """Copy the state."""

    def put_back(self, state: Any) -> None:
        """Load a copied state."""


@dataclass(frozen=True)
class _Reading:
    """The largest magnitude of each tensor that was read, and the weights' gradients."""

    largest: Any
    gradients: Sequence[Any]


class StepReader:
    """A traced step that also returns the largest magnitude of its tensors."""

    def __init__(self, trainee: TracedModel, batch: Any, dtypes: Sequence[str]) -> None:
        if not on_tensorflow():
            raise UsageError(
                "magnitudes of the backward pass are read from TensorFlow's graphs; Keras runs on "
                f"{keras.config.backend()!r} here: set KERAS_BACKEND=tensorflow for this"
            )
        self._trainee, self.model = trainee, trainee.model
        self._dtypes = frozenset(dtypes)
        self.units = layer_units(self.model)
        self.calls: list[LayerCall] = []
        self.names: list[str] = []
        self._run = self._trace(batch)

    def _trace(self, batch: Any) -> Callable[..., Any]:
        import tensorflow as tf

        def run(given: Any, scale: Any) -> Any:
            loss, gradients = loss_and_gradients(self.model, given, scale)
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
        kept = self._trainee.take_state()
        largest, gradients = self._run(batch, scale)
        self._trainee.put_back(kept)
        return _Reading(to_numpy(largest), [to_numpy(g) for g in gradients])

    def backward(self, batch: Any) -> tuple[_Reading, Any]:
        """Return the reading at loss scale 1, and which of its tensors are of the backward pass."""
        once, more = self.read(batch, 1.0), self.read(batch, SCALE_FACTOR)
        grew = more.largest == once.largest * SCALE_FACTOR
        infinite = ~np.isfinite(once.largest) & np.array([is_backward(n) for n in self.names], bool)
        return once, (grew & (once.largest > 0) & np.isfinite(once.largest)) | infinite


def float16_magnitudes(reader: StepReader, batch: Any, scale: float) -> Float16Magnitudes:
    """Read the largest forward and backward numbers; None where not finite or absent.

    The backward pass is read at the recipe's own loss scale, as float16 rounds it there, and once
    more far below: what did not shrink are weights and activations that pass through.
    """
    at_scale, below = (reader.read(batch, each).largest for each in (scale, scale / SCALE_FACTOR))
    behind = np.array([is_backward(name) for name in reader.names], bool)
    forward, backward = _largest_of(at_scale[~behind]), None
    if np.isfinite(at_scale[behind]).all():
        grew = behind & (at_scale > below * math.sqrt(SCALE_FACTOR))
        backward = _largest_of(at_scale[grew])
    unscaled = None if backward is None else backward / scale
    return Float16Magnitudes(forward, not np.isfinite(at_scale[~behind]).all(), unscaled)


def _largest_of(found: Any) -> float | None:
    """Return the largest of some magnitudes; None where one is not finite, or there is none."""
    return float(found.max()) if found.size and np.isfinite(found).all() else None


def backward_magnitudes(reader: StepReader, batch: Any) -> tuple[list[float], dict[int, float]]:
    """Return the largest magnitude of each backward tensor, and the gradients' exponents."""
    reading, backward = reader.backward(batch)
    shares = weighted_shares((_norm(g), _exponent_counts(g)) for g in reading.gradients)
    return reading.largest[backward].tolist(), shares


def _norm(gradient: Any) -> float:
    return float(np.linalg.norm(np.abs(gradient).astype(np.float64)))


def _exponent_counts(gradient: Any) -> dict[int, int]:
    values, counts = np.unique(exponents_of(gradient), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def exponents_of(values: Any) -> Any:
    """Return floor(log2 |x|) of every finite, non-zero element."""
    flat = np.abs(values[np.isfinite(values) & (values != 0)]).astype(np.float64)
    return np.frexp(flat)[1] - 1


def by_unit(reader: StepReader, batch: Any, scale: float) -> tuple[UnitTrace, ...]:
    """Measure each unit's largest exponents, and its gradient's float16 underflow at `scale`.

    Forward it is the unit's own outputs, backward every tensor of its gradient.
    """
    reading, backward = reader.backward(batch)
    graph = StepGraph((), reader.calls)
    places = {name: index for index, name in enumerate(reader.names)}
    gradients = dict(
        zip((id(v) for v in reader.model.trainable_variables), reading.gradients, strict=False)
    )
    of_unit: dict[str, list[float]] = {}
    for index in np.flatnonzero(backward).tolist():
        name = reader.names[index]
        path = graph.unit_of(name) if is_backward(name) else None
        if path is not None:
            of_unit.setdefault(path, []).append(float(reading.largest[index]))
    traces = []
    for unit in reader.units:
        outputs = [
            float(reading.largest[places[tensor.name]])
            for call in reader.calls
            if call.unit is unit
            for tensor in call.outputs
            if getattr(tensor, "name", None) in places
        ]
        if has_own_code(unit) and (outputs or unit.path in of_unit):
            traces.append(
                UnitTrace(
                    unit.path,
                    largest_exponent(outputs),
                    largest_exponent(of_unit.get(unit.path, [])),
                    _underflow(unit, gradients, scale),
                )
            )
    return tuple(traces)


def _underflow(unit: LayerUnit, gradients: dict[int, Any], scale: float) -> float:
    """Return the share of a unit's non-zero gradient that underflows in float16 at `scale`."""
    own = {id(v) for layer in unit.members for v in layer._trainable_variables}
    found = [exponents_of(gradients[key]) for key in own if key in gradients]
    exponents = np.concatenate(found) if found else np.zeros(0)
    if exponents.size == 0:
        return 0.0
    return float(np.mean(exponents < least_float16_exponent(scale)))
