"""What a Keras model's configuration leaves out, for copies that are made of it.

In a configuration a class or a function is a name, which may be one of Keras's own; what
preprocessing layers have adapted to is not in it, nor which layers share a policy, which tells
those that were given a `dtype` of their own.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from autoprec.backends.keras.train.data import to_numpy


@dataclass(frozen=True)
class LeftOut:
    """What one layer's configuration leaves out; `words` and their weights are a vocabulary's.

    `trained` says which of its own weights train while the layer does.
    """

    kind: type
    trainable: bool
    trained: Sequence[bool]
    policy: Any
    functions: Mapping[str, Any]
    words: Sequence[Any] | None = None
    word_weights: Any = None

    @staticmethod
    def of(layer: Any) -> LeftOut:
        """Read a layer."""
        policy = layer.dtype_policy
        functions = {
            name: value
            for name, value in vars(layer).items()
            if isinstance(value, types.FunctionType) and not hasattr(type(layer), name)
        }
        words = layer.get_vocabulary() if hasattr(layer, "get_vocabulary") else None
        weights = getattr(getattr(layer, "_lookup_layer", layer), "idf_weights", None)
        return LeftOut(
            type(layer),
            layer.trainable,
            [each.trainable for each in layer._trainable_variables],
            policy if type(policy) is keras.DTypePolicy else None,
            functions,
            words,
            None if weights is None or words is None else to_numpy(weights)[: len(words)],
        )

    def give(self, layer: Any) -> None:
        """Give it to a copy of the layer."""
        if layer.trainable != self.trainable:
            layer.trainable = self.trainable
        for variable, trained in zip(layer._trainable_variables, self.trained, strict=False):
            variable.trainable = trained
        if self.policy is not None:
            layer.dtype_policy = self.policy
        vars(layer).update({n: f for n, f in self.functions.items() if n in vars(layer)})
        if self.words is not None and self.words != layer.get_vocabulary():
            layer.set_vocabulary(self.words, self.word_weights)


def left_out(model: Any) -> list[LeftOut]:
    """Return what the configurations of a model's layers leave out."""
    return [LeftOut.of(layer) for layer in model._flatten_layers()]


def give(parts: Sequence[LeftOut], copy: Any) -> None:
    """Give it to a copy that has the same layers by now."""
    layers = copy._flatten_layers()
    if [type(layer) for layer in layers] == [each.kind for each in parts]:
        for each, layer in zip(parts, layers, strict=True):
            each.give(layer)


def finish(copy: Any) -> None:
    """Let a copy's layers take over the weights that it was given."""
    for layer in copy._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def own_objects(model: Any) -> dict[str, Any]:
    """Map names to the classes and functions of others than Keras that a model is made of."""
    found = [value for layer in model._flatten_layers() for value in (layer, *vars(layer).values())]
    compiled = vars(model).get("_compile_config")
    if compiled is not None:
        found += keras.tree.flatten(compiled.config)
    known: dict[str, Any] = {}
    for value in _with_what_they_hold(found):
        function = isinstance(value, types.FunctionType)
        kind = value if function else type(value)
        if (function or hasattr(kind, "from_config")) and not _is_of_keras(kind):
            known[kind.__name__] = kind
    return known


def _with_what_they_hold(values: Sequence[Any]) -> Iterator[Any]:
    """Yield values; after an optimizer, a loss or a metric what it holds."""
    kinds = (keras.optimizers.Optimizer, keras.losses.Loss, keras.metrics.Metric)
    for value in values:
        yield value
        if isinstance(value, kinds):
            yield from vars(value).values()


def _is_of_keras(kind: Any) -> bool:
    return str(getattr(kind, "__module__", "")).startswith("keras.")
