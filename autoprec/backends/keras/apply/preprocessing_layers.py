"""Finds the layers that only prepare a model's inputs: they stay in float32.

Ids above 256 and large measurements do not survive bfloat16, and 16 bits save nothing before the
first matrix product, which casts its inputs itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from autoprec.backends.keras.apply.layer_names import PASSIVE_LAYERS, LayerUnit, has_graph

_PREPROCESSING = "keras.src.layers.preprocessing."


def input_preparing_layers(units: Sequence[LayerUnit]) -> set[int]:
    """Collect the ids of preprocessing layers, and of those that only rearrange inputs."""
    found = {id(unit.layer) for unit in units if is_preprocessing(unit.layer)}
    model = units[0].layer
    if has_graph(model):
        raw = {id(tensor) for tensor in keras.tree.flatten(model.inputs)}
        found |= _passing_layers(model, raw)
    return found


def is_preprocessing(layer: Any) -> bool:
    """Say whether a layer is one of Keras's preprocessing layers, or derived from one."""
    return any(kind.__module__.startswith(_PREPROCESSING) for kind in type(layer).__mro__)


def _passing_layers(model: Any, raw: set[int]) -> set[int]:
    """Collect the ids of the layers that only pass on `raw` tensors and what is made of them."""
    found: set[int] = set()
    others: set[int] = set()
    for node in _graph_calls(model):
        layer = node.operation
        if not all(id(tensor) in raw for tensor in node.input_tensors):
            others.add(id(layer))
        elif isinstance(layer, keras.Model) and has_graph(layer):
            found |= _passing_layers(
                layer, {id(tensor) for tensor in keras.tree.flatten(layer.inputs)}
            )
        elif isinstance(layer, PASSIVE_LAYERS) or is_preprocessing(layer):
            found.add(id(layer))
            raw.update(id(tensor) for tensor in keras.tree.flatten(node.outputs))
    return found - others


def _graph_calls(model: Any) -> list[Any]:
    """List the calls of a model's graph in the order they are made, without its inputs."""
    graph = getattr(model, "_functional", None) or model
    by_depth = graph._nodes_by_depth
    calls = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in calls if not node.is_input]
