"""Keeps a model's outputs, and the arithmetic of its last activation, in float32.

A 16-bit softmax loses what the loss is computed from, so the last activation runs in float32 even
where it is part of a Dense layer whose matrix product runs in 16 bits. Only the call of a layer is
wrapped; its attributes, weights and configuration stay. Wrappers are callable objects, so that
copying a layer copies them with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras

from autoprec.backends.keras.layers import Placed, children
from autoprec.backends.keras.policies import LayerPolicies, saved_as_float32

#: Layers whose `activation` is the last thing they do, after their matrix product.
_PRODUCT_THEN_ACTIVATION = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
)

#: Layers that only move values about: what they are given decides their precision.
_PASSIVE = (
    keras.layers.Reshape,
    keras.layers.Flatten,
    keras.layers.Permute,
    keras.layers.RepeatVector,
    keras.layers.Identity,
    keras.layers.Dropout,
    keras.layers.Concatenate,
)


def to_float32(value: Any) -> Any:
    """Cast every floating tensor in a nested `value` to float32; leave the rest."""
    return keras.tree.map_structure(_tensor_to_float32, value)


def _tensor_to_float32(value: Any) -> Any:
    dtype = getattr(value, "dtype", None)
    if dtype is None or keras.backend.standardize_dtype(dtype) not in ("bfloat16", "float16"):
        return value
    mask = getattr(value, "_keras_mask", None)
    result = keras.ops.cast(value, "float32")
    if mask is not None:
        result._keras_mask = mask
    return result


@dataclass
class Float32Outputs:
    """A layer's `call`, giving float32; with `split`, its activation is computed in float32 too."""

    layer: Any
    original: Callable[..., Any]
    split: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer."""
        if not self.split:
            return to_float32(self.original(*args, **kwargs))
        activation = self.layer.activation
        object.__setattr__(self.layer, "activation", keras.activations.linear)
        try:
            result = self.original(*args, **kwargs)
        finally:
            object.__setattr__(self.layer, "activation", activation)
        return activation(to_float32(result))


@dataclass
class SavedConfig:
    """A layer's `get_config`, saying float32: a file must not depend on the wrapper being there."""

    original: Callable[[], dict[str, Any]]

    def __call__(self) -> dict[str, Any]:
        """Return the layer's configuration."""
        config = dict(self.original())
        config["dtype"] = keras.dtype_policies.serialize(saved_as_float32())
        return config


@dataclass
class Wraps:
    """Instance attributes put on layers, to be taken off again."""

    _installed: list[tuple[Any, str, Any]] = field(default_factory=list)

    def install(self, layer: Any, name: str, value: Any) -> None:
        """Put `value` over the method `name` of this one layer."""
        self._installed.append((layer, name, vars(layer).get(name)))
        object.__setattr__(layer, name, value)

    def restore(self) -> None:
        """Take everything off, last first."""
        while self._installed:
            layer, name, before = self._installed.pop()
            if before is None:
                vars(layer).pop(name, None)
            else:
                object.__setattr__(layer, name, before)


class OutputsInFloat32:
    """Makes one model's outputs float32; `islands` says what that put into float32, and how."""

    def __init__(self, policies: LayerPolicies, wraps: Wraps) -> None:
        self._policies = policies
        self._wraps = wraps
        self._places: dict[int, Placed] = {}
        self._lifted: set[int] = set()
        self.islands: list[str] = []

    def apply(self, placed: tuple[Placed, ...]) -> None:
        """Find what ends the model `placed[0]`, and lift it."""
        model = placed[0].layer
        self._places = {id(unit.layer): unit for unit in placed}
        if _has_graph(model):
            for tensor in keras.tree.flatten(model.outputs):
                self._walk(tensor)
            return
        for unit in placed:
            if _activation_name(unit.layer) in ("softmax", "log_softmax"):
                self.lift(unit.layer)
        if _activation_name(unit := placed[-1].layer) not in ("", "linear"):
            self.lift(unit)
        self._wraps.install(model, "call", OpaqueOutputs(model, model.call, self))

    def _walk(self, tensor: Any) -> None:
        history = getattr(tensor, "_keras_history", None)
        if history is None:
            return
        operation = history.operation
        if isinstance(operation, keras.Model) and _has_graph(operation):
            inner = keras.tree.flatten(operation.outputs)
            self._walk(inner[min(history.tensor_index, len(inner) - 1)])
        elif isinstance(operation, keras.layers.Layer) and not isinstance(operation, _PASSIVE):
            self.lift(operation)
        else:
            if id(operation) in self._places:
                self._policies.set(self._places[id(operation)], "float32")
            for source in operation._inbound_nodes[history.node_index].input_tensors:
                self._walk(source)

    def lift(self, layer: Any) -> None:
        """Make one layer's output float32: all of it where it has no weights, else its end."""
        unit = self._places.get(id(layer))
        if unit is None or id(layer) in self._lifted or layer.compute_dtype == "float32":
            return
        self._lifted.add(id(layer))
        if not layer.weights and not children(layer):
            self._policies.set(unit, "float32")
            self.islands.append(unit.path)
            return
        split = _activation_name(layer) not in ("", "linear")
        self._wraps.install(layer, "call", Float32Outputs(layer, layer.call, split))
        self._wraps.install(layer, "get_config", SavedConfig(layer.get_config))
        if split:
            self.islands.append(f"{unit.path} (activation)")


def _has_graph(model: Any) -> bool:
    return bool(getattr(model, "outputs", None)) and hasattr(model.outputs[0], "_keras_history")


def _activation_name(layer: Any) -> str:
    """The name of what a product layer does last; empty where it cannot be told apart."""
    activation = getattr(layer, "activation", None)
    if not isinstance(layer, _PRODUCT_THEN_ACTIVATION) or activation is None:
        return ""
    if isinstance(activation, keras.layers.Layer):
        return ""
    return str(getattr(activation, "__name__", type(activation).__name__))


@dataclass
class OpaqueOutputs:
    """The `call` of a model without a graph: what ends it is seen when it is first run.

    On TensorFlow the first call traces the model once into a scratch graph, which runs nothing, to
    see which layer made the output. Elsewhere only the layers that end in a softmax are known.
    """

    model: Any
    original: Callable[..., Any]
    outputs: OutputsInFloat32
    resolved: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, having looked once at what ends it."""
        if not self.resolved and self.model.built:
            self.resolved = True
            if keras.config.backend() == "tensorflow":
                for layer in _last_layers(self.model, self.original, args, kwargs):
                    self.outputs.lift(layer)
        return to_float32(self.original(*args, **kwargs))


def _last_layers(model: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[Any]:
    """The layers whose outputs a model returns, or the last it called before its own code."""
    import tensorflow as tf

    calls: list[tuple[Any, list[Any]]] = []
    results: list[Any] = []
    watch = Wraps()
    for layer in model._flatten_layers(include_self=False):
        watch.install(layer, "call", _Watched(layer, layer.call, calls))

    def run() -> None:
        results.extend(keras.tree.flatten(call(*args, **kwargs)))

    try:
        tf.function(run, autograph=False).get_concrete_function()
    finally:
        watch.restore()
    direct = {id(layer) for layer in children(model)}
    for result in results:
        makers = [layer for layer, made in calls if any(result is tensor for tensor in made)]
        if not makers:
            makers = [layer for layer, _ in reversed(calls) if id(layer) in direct]
        yield from makers[:1]


@dataclass
class _Watched:
    layer: Any
    original: Callable[..., Any]
    calls: list[tuple[Any, list[Any]]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.original(*args, **kwargs)
        self.calls.append((self.layer, keras.tree.flatten(result)))
        return result
