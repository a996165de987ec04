"""What the guides teach about mixed precision, applied to the user's own model.

Advice is data: sentences that say what, why and what to do. Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from autoprec.backends.keras.apply.dtype_policies import low_precision
from autoprec.backends.keras.apply.layer_names import LayerUnit
from autoprec.backends.keras.dtypes import is_low
from autoprec.backends.protocol import Task
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.recipe import Recipe
from autoprec.core.speed.knobs import wanted_multiples

#: Below this many weights a step is mostly overhead: TensorFlow's mixed precision guide makes its
#: example model 4096 wide for this reason.
TINY_WEIGHTS = 100_000


def advise(recipe: Recipe, units: Sequence[LayerUnit], facts: DeviceFacts | None) -> list[str]:
    """List what is worth knowing about `recipe` on a model, each with what to do.

    Without the device's `facts` there is no advice on its alignment.
    """
    if not recipe.policy.mixed:
        return []
    model = units[0].layer
    notes = []
    weights = sum(_size(v) for v in model.weights)
    if model.built and weights < TINY_WEIGHTS:
        notes.append(
            f"the model has only {weights:,} weights: too small to benefit from {recipe.policy}; "
            "measure before keeping it, or use float32"
        )
    notes += _misaligned_sizes(recipe, units, facts)
    notes += _sixteen_bit_inputs(model)
    if any(policy in low_precision(units) for policy in ("16-bit weights", "quantised")):
        notes.append(f"left as it is: {low_precision(units)}")
    return notes


def _misaligned_sizes(
    recipe: Recipe, units: Sequence[LayerUnit], facts: DeviceFacts | None
) -> list[str]:
    multiples = () if facts is None else wanted_multiples(facts, [recipe.policy])
    if not multiples:
        return []
    multiple = multiples[0]
    off = [
        f"{unit.path}.{name}={size}"
        for unit in units
        for name, size in dimensions(unit.layer)
        if size % multiple
    ]
    if not off:
        return []
    shown = ", ".join(off[:8]) + (f" and {len(off) - 8} more" if len(off) > 8 else "")
    return [
        f"these dimensions are not multiples of {multiple}, which this device's matrix units need: "
        f"{shown}; round them up, or let the profile pad them"
    ]


def _sixteen_bit_inputs(model: Any) -> list[str]:
    inputs = getattr(model, "inputs", None) or []
    named = [t.name for t in inputs if is_low(t.dtype)]
    if not named:
        return []
    return [
        f"the inputs {', '.join(named)} are 16-bit: keep the input pipeline in float32 on the CPU "
        "and let the first layer cast"
    ]


def sixteen_bit_data(batch: Any) -> list[str]:
    """Return advice about a batch that holds 16-bit values; empty where it holds none."""
    if not any(is_low(getattr(leaf, "dtype", None)) for leaf in keras.tree.flatten(batch)):
        return []
    return [
        "build_data yields 16-bit floats: input pipelines run on the CPU, where they are slower "
        "and lose precision; yield float32 and let the first layer cast"
    ]


def unused_functions(task: Task) -> list[str]:
    """List functions of a task file that only PyTorch uses, each with where it belongs."""
    instead = {
        "loss_fn": "compile(loss=...)",
        "training_step": "the model's train_step",
        "build_optimizer": "compile(optimizer=...)",
    }
    return [
        f"{name} is not used: a Keras model trains by its own compile; put it into {place}, or "
        "delete it"
        for name, place in instead.items()
        if getattr(task, name) is not None
    ]


def dimensions(layer: Any) -> list[tuple[str, int]]:
    """List the dimensions of a layer's matrix products that padding could reach: (name, size)."""
    kernel = getattr(layer, "kernel", None) if getattr(layer, "built", False) else None
    if isinstance(layer, keras.layers.Embedding):
        return [("output_dim", int(layer.output_dim))]
    if kernel is None or len(kernel.shape) < 2 or isinstance(layer, keras.layers.EinsumDense):
        return []
    if isinstance(layer, keras.layers.Dense):
        return [("inputs", int(kernel.shape[0])), ("units", int(layer.units))]
    if hasattr(layer, "filters") and layer.filters:
        return [("channels", int(kernel.shape[-2])), ("filters", int(layer.filters))]
    return []


def _size(variable: Any) -> int:
    size = 1
    for length in variable.shape:
        size *= int(length)
    return size
