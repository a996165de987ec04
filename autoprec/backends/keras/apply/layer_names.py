"""Names a model's layers so that a recipe finds them again, in this build of the model or the next.

Keras numbers unnamed layers by a counter of the process (`dense_7`), so the same model built twice
has other names. A path here is the chain of names from the model down, joined by "/", where an
automatic name is replaced by the layer's class and its position among the unnamed siblings of that
class: `encoder/dense`, `encoder/dense_1`. The model itself has the empty path. Recurrent layers
and the cells inside them are one unit, because a loop's state has one dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from autoprec.errors import UsageError

#: Layers that only move values about: what they are given decides their precision.
PASSIVE_LAYERS = (
    keras.layers.Reshape,
    keras.layers.Flatten,
    keras.layers.Permute,
    keras.layers.RepeatVector,
    keras.layers.Identity,
    keras.layers.Dropout,
    keras.layers.Concatenate,
)


@dataclass(frozen=True)
class LayerUnit:
    """A layer where it stands: its path, its parent, and the layers that follow its policy.

    `members` is the layer itself and, for a recurrent layer, everything inside it.
    """

    path: str
    layer: Any
    parent: LayerUnit | None
    members: tuple[Any, ...]

    @property
    def kind(self) -> str:
        """Return the name of the layer's class."""
        return type(self.layer).__name__


def has_own_code(unit: LayerUnit) -> bool:
    """Say whether a layer computes anything itself: no input, no graph of other layers."""
    if isinstance(unit.layer, keras.layers.InputLayer | keras.layers.Identity):
        return False
    graph = isinstance(unit.layer, keras.Sequential) or type(unit.layer).__name__ == "Functional"
    return not (graph and child_layers(unit.layer))


def has_graph(model: Any) -> bool:
    """Say whether a model knows which operations make its outputs."""
    return bool(getattr(model, "outputs", None)) and hasattr(model.outputs[0], "_keras_history")


def own_steps(model: Any) -> list[str]:
    """List which of a model's steps are not Keras's own: "train_step", "predict_step"."""
    steps = ("train_step", "test_step", "predict_step")
    found = [(name, getattr(type(model), name, None)) for name in steps]
    return [name for name, own in found if own not in (None, getattr(keras.Model, name))]


def child_layers(layer: Any) -> list[Any]:
    """List the layers held directly by `layer`, in order."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def layer_units(model: Any) -> tuple[LayerUnit, ...]:
    """List every layer of `model` with its path, parents first; a shared layer once."""
    return tuple(_walk(model, "", None, set()))


def _walk(layer: Any, path: str, parent: LayerUnit | None, seen: set[int]) -> Iterator[LayerUnit]:
    seen.add(id(layer))
    if isinstance(layer, keras.layers.RNN):
        inside = tuple(layer._flatten_layers(include_self=False))
        seen.update(id(member) for member in inside)
        yield LayerUnit(path, layer, parent, (layer, *inside))
        return
    unit = LayerUnit(path, layer, parent, (layer,))
    yield unit
    inner = [child for child in child_layers(layer) if id(child) not in seen]
    for child, name in zip(inner, _sibling_names(inner), strict=True):
        if id(child) not in seen:
            yield from _walk(child, f"{path}/{name}" if path else name, unit, seen)


def _sibling_names(layers: Sequence[Any]) -> list[str]:
    counts: dict[str, int] = {}
    taken: set[str] = set()
    names = []
    for layer in layers:
        name = stem = layer.name
        automatic = snake_case(type(layer).__name__)
        if re.fullmatch(re.escape(automatic) + r"(_\d+)?", stem):
            count = counts.get(automatic, 0)
            counts[automatic] = count + 1
            name = automatic if count == 0 else f"{automatic}_{count}"
            stem = automatic
        while name in taken:
            counts[stem] = counts.get(stem, 0) + 1
            name = f"{stem}_{counts[stem]}"
        taken.add(name)
        names.append(name)
    return names


def snake_case(name: str) -> str:
    """Name a class as Keras does: `Conv2DTranspose` gives `conv2d_transpose`."""
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def resolve_layers(patterns: Sequence[str], units: Sequence[LayerUnit]) -> tuple[LayerUnit, ...]:
    """Find the layers that `patterns` name: an exact path, else exactly one full match.

    The path as written here goes first, then Keras's own `layer.path` and name in this build, then
    the pattern as a regular expression over whole paths. None and two matches are a `UsageError`.
    """
    return tuple(dict.fromkeys(_resolve_one(pattern, units) for pattern in patterns))


def _resolve_one(pattern: str, units: Sequence[LayerUnit]) -> LayerUnit:
    for exact in (
        [p for p in units if p.path == pattern],
        [p for p in units if getattr(p.layer, "path", None) == pattern],
        [p for p in units if p.path and p.layer.name == pattern],
    ):
        if len(exact) == 1:
            return exact[0]
    try:
        found = [p for p in units if p.path and re.fullmatch(pattern, p.path)]
    except re.error as error:
        raise UsageError(f"float32 module {pattern!r} is not a pattern: {error}") from error
    if len(found) == 1:
        return found[0]
    if found:
        paths = ", ".join(p.path for p in found[:6])
        raise UsageError(
            f"float32 module {pattern!r} matches {len(found)} layers ({paths}); "
            "expected exactly one: write its whole path"
        )
    known = ", ".join(p.path for p in units[1:13])
    raise UsageError(
        f"float32 module {pattern!r} matches no layer of this model; its layers are: {known}"
    )
