"""Keeps a model's outputs, and the arithmetic of its last activation, in float32.

A 16-bit softmax loses what the loss is computed from, so the last activation runs in float32 even
where it is part of a Dense layer whose matrix product runs in 16 bits. Only the call of a layer is
wrapped; its attributes, weights and configuration stay. Wrappers are callable objects, so that
copying a layer copies them with it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from autoprec.backends.keras.apply.dtype_policies import LayerPolicies
from autoprec.backends.keras.apply.first_call_hook import outermost_called_layer
from autoprec.backends.keras.apply.layer_names import (
    PASSIVE_LAYERS,
    LayerUnit,
    child_layers,
    has_graph,
    own_steps,
    snake_case,
)
from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.backends.keras.apply.nested_outputs import tensors_in, to_float32
from autoprec.backends.keras.apply.skipped_updates import STATE
from autoprec.errors import AutoprecWarning

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


class Float32Outputs(Hook):
    """A layer's `call`, giving float32; with `split`, its activation is computed in float32 too."""

    def __init__(self, layer: Any, original: Callable[..., Any], split: bool = False) -> None:
        super().__init__(original)
        self.layer = layer
        self.split = split

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


class OutputsInFloat32:
    """Makes one model's outputs float32; `islands` says what that put into float32, and how."""

    def __init__(self, policies: LayerPolicies, hooks: InstalledHooks) -> None:
        self._policies = policies
        self._hooks = hooks
        self._units_by_id: dict[int, LayerUnit] = {}
        self._made_float32: set[int] = set()
        self.islands: list[str] = []

    def apply(self, units: tuple[LayerUnit, ...]) -> None:
        """Find the layers that end the model `units[0]`, and make their outputs float32."""
        model = units[0].layer
        self.add_units(units)
        self.make_direct_calls_float32(units)
        for name in own_steps(model):  # which may call layers by themselves
            self._hooks.install(model, name, Float32Outputs(model, getattr(model, name)))
        if has_graph(model):
            for tensor in keras.tree.flatten(model.outputs):
                self._walk_back(tensor)
            return
        self.make_softmax_float32(units)
        if _activation_name(unit := units[-1].layer) not in ("", "linear"):
            self.make_float32(unit)
        self._hooks.install(model, "call", UngraphedOutputs(model, model.call, self))

    def make_direct_calls_float32(self, units: Sequence[LayerUnit]) -> None:
        """Make what models inside the model give to a script float32, as in a `train_step`."""
        for unit in units:
            if isinstance(unit.layer, keras.Model) and unit.parent is not None:
                self._hooks.install(unit.layer, "call", ModelOutputs(unit.layer, unit.layer.call))

    def add_units(self, units: Sequence[LayerUnit]) -> None:
        """Take in where layers stand; those made later too."""
        self._units_by_id.update((id(unit.layer), unit) for unit in units)

    def make_softmax_float32(self, units: Sequence[LayerUnit]) -> None:
        """Lift every layer that ends in a softmax, wherever it is."""
        for unit in units:
            if _activation_name(unit.layer) in ("softmax", "log_softmax"):
                self.make_float32(unit.layer)

    def _walk_back(self, tensor: Any) -> None:
        history = getattr(tensor, "_keras_history", None)
        if history is None:
            return
        operation = history.operation
        if isinstance(operation, keras.Model) and has_graph(operation):
            inner = keras.tree.flatten(operation.outputs)
            self._walk_back(inner[min(history.tensor_index, len(inner) - 1)])
        elif isinstance(operation, keras.layers.Layer) and not isinstance(
            operation, PASSIVE_LAYERS
        ):
            self.make_float32(operation)
        else:
            if id(operation) in self._units_by_id:
                self._policies.set(self._units_by_id[id(operation)], "float32")
            for source in operation._inbound_nodes[history.node_index].input_tensors:
                self._walk_back(source)

    def make_float32(self, layer: Any) -> None:
        """Make one layer's output float32: all of it where it has no weights, else its end."""
        unit = self._units_by_id.get(id(layer))
        if unit is None or id(layer) in self._made_float32 or layer.compute_dtype == "float32":
            return
        self._made_float32.add(id(layer))
        if _has_no_weights(layer):
            self._policies.set(unit, "float32")
            self.islands.append(unit.path)
            return
        split = _activation_name(layer) not in ("", "linear")
        activation = self._units_by_id.get(id(getattr(layer, "activation", None)))
        if split and activation is not None:
            self._policies.set(activation, "float32")
        self._hooks.install(layer, "call", Float32Outputs(layer, layer.call, split))
        if split:
            self.islands.append(f"{unit.path} (activation)")


def _has_no_weights(layer: Any) -> bool:
    """Say whether a layer has neither weights nor layers, now or once it is built."""
    return not (layer.weights or child_layers(layer) or isinstance(layer, _PRODUCT_THEN_ACTIVATION))


def _activation_name(layer: Any) -> str:
    """Return the name of a product layer's activation; empty where it cannot be split off."""
    activation = getattr(layer, "activation", None)
    if not isinstance(layer, _PRODUCT_THEN_ACTIVATION) or activation is None:
        return ""
    if isinstance(activation, keras.layers.Layer):
        return snake_case(type(activation).__name__)
    return str(getattr(activation, "__name__", type(activation).__name__))


class ModelOutputs(Hook):
    """The `call` of a model, giving float32 where a script calls it itself.

    Within the call of another layer its output is one of many in between, and stays as it is.
    """

    def __init__(self, model: Any, original: Callable[..., Any]) -> None:
        super().__init__(original)
        self.model = model
        self.named: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        result = self.original(*args, **kwargs)
        outermost = outermost_called_layer()
        within = outermost is not None and outermost is not self.model
        return result if within else to_float32(result, self._name)

    def _name(self, value: Any, why: str) -> None:
        """Warn, once for each class, of an object whose tensors stay in 16 bits."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        if kind in self.named:
            return
        self.named.add(kind)
        warnings.warn(
            f"{self.model.name} returns a {kind} with 16-bit tensors, which stay so: a copy of it "
            f"in float32 could not be made ({why}). Cast them where the model makes it: "
            "keras.ops.cast(tensor, 'float32'); or return a tuple, dict or dataclass",
            AutoprecWarning,
            stacklevel=3,
        )


class UngraphedOutputs(ModelOutputs):
    """The `call` of a model without a graph: the layers that end it are found when it first runs.

    On TensorFlow the first call traces the model once into a scratch graph, which runs nothing, to
    see which layer made the output. Elsewhere only the layers that end in a softmax are known. It
    gives float32 wherever it is called.
    """

    def __init__(self, model: Any, original: Callable[..., Any], outputs: OutputsInFloat32) -> None:
        super().__init__(model, original)
        self.outputs = outputs
        self.resolved = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, having looked once at what ends it."""
        if not self.resolved and self.model.built:
            self.resolved = True
            if keras.config.backend() == "tensorflow":
                for layer in _last_layers(self.model, self.original, args, kwargs):
                    self.outputs.make_float32(layer)
        return to_float32(self.original(*args, **kwargs), self._name)


def _last_layers(model: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the layers whose outputs a model returns, or feeds to its own final code.

    Code that gets one tensor in float32 and another in 16 bits would mix dtypes, which may raise.
    """
    import tensorflow as tf

    calls: list[tuple[Any, list[Any]]] = []
    results: list[Any] = []
    recorders = InstalledHooks()
    for layer in model._flatten_layers(include_self=False):
        recorders.install(layer, "call", _OutputRecorder(layer, calls))

    def run() -> None:
        results.extend(tensors_in(call(*args, **kwargs)))
        STATE.end_step()  # this function never runs, and leaves no step open

    try:
        with _added_losses_restored(model):
            tf.function(run, autograph=False).get_concrete_function()
    finally:
        recorders.restore()
    direct = {id(layer) for layer in child_layers(model)}
    made = {_key(t): layer for layer, tensors in calls if id(layer) in direct for t in tensors}
    for result in results:
        makers = [layer for layer, tensors in calls if any(result is tensor for tensor in tensors)]
        yield from makers[:1] or _source_layers(result, made)


def _source_layers(result: Any, made: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the layers from whose outputs the model's own code alone computed `result`."""
    pending, visited = [result], set()
    while pending:
        tensor = pending.pop()
        if (key := _key(tensor)) in visited:
            continue
        visited.add(key)
        if key in made:
            yield made[key]
        elif hasattr(tensor, "op"):
            pending += tensor.op.inputs


def _key(tensor: Any) -> str:
    return str(getattr(tensor, "name", id(tensor)))


@contextlib.contextmanager
def _added_losses_restored(model: Any) -> Iterator[None]:
    """Forget the losses that layers add inside: they are tensors of the scratch graph."""
    before = [(each, list(each._losses), set(each._loss_ids)) for each in model._flatten_layers()]
    try:
        yield
    finally:
        for layer, losses, ids in before:
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)


class _OutputRecorder(Hook):
    """A layer's `call` that notes its outputs."""

    def __init__(self, layer: Any, calls: list[tuple[Any, list[Any]]]) -> None:
        super().__init__(layer.call)
        self.layer, self.calls = layer, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.original(*args, **kwargs)
        self.calls.append((self.layer, tensors_in(result)))
        return result
