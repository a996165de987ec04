"""Computes layers at sizes that are multiples of what the device's matrix units need.

Zeros are added to kernel and input before the product and cut off after it, at compute time only:
the variables keep their objects, shapes, names and optimizer state. Added rows and columns of zeros
add exact zeros to every sum; the result equals the unpadded one within the rounding of a
differently blocked product. The decision and its reason are one: `padding_obstacle` returns the
first reason against padding a layer, or nothing. Whether it pays is for a measurement to say.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from autoprec.backends.keras.apply.layer_names import LayerUnit
from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.core.recipe import Alignment

_ROUTER_NAMES = re.compile(r"^(.*router.*|gate|gating|gat(e|ing)_network|switch|selector)$")
_CHOICE_CALLS = re.compile(r"\b(top_k|argmax|argsort|sort|categorical)\s*\(")
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


@dataclass(frozen=True)
class PaddedLayer:
    """A layer whose products are padded: each dimension's size before and after."""

    path: str
    kind: str
    sizes: tuple[tuple[str, int, int], ...]


def pad_layers(
    units: Sequence[LayerUnit], alignment: Alignment, hooks: InstalledHooks
) -> tuple[tuple[PaddedLayer, ...], tuple[tuple[str, str], ...]]:
    """Pad the layers `alignment` names; return what was padded, and what was not with why."""
    by_path = {unit.path: unit for unit in units}
    padded, skipped = [], []
    for path in alignment.modules:
        unit = by_path.get(path)
        if unit is None:
            skipped.append((path, "this model has no layer of that name"))
        elif reason := padding_obstacle(unit, alignment.multiple):
            skipped.append((path, reason))
        else:
            padded.append(_describe(unit, alignment.multiple))
            wrapper = _wrapper_of(unit.layer)(unit.layer, alignment.multiple)
            hooks.install(unit.layer, "call", wrapper)
    return tuple(padded), tuple(skipped)


def padding_obstacle(unit: LayerUnit, multiple: int) -> str:
    """Return the first reason why a layer cannot be padded; empty if it can."""
    layer = unit.layer
    if _wrapper_of(layer) is _UnknownLayer:
        return f"padding knows Dense, EinsumDense, Conv and Embedding, not {unit.kind}"
    if type(layer).call is not _padded_kind(layer).call:
        return f"{unit.kind} computes in its own way"
    if not layer.built:
        return "it is not built yet: call the model once before applying the profile"
    if layer.quantization_mode is not None or getattr(layer, "lora_enabled", False):
        return "its kernel is quantised or has a LoRA"
    if reason := _geometry_obstacle(layer) or _routing_obstacle(unit):
        return reason
    if not any(size % multiple for _, size in _sizes(layer)):
        return f"every dimension is a multiple of {multiple} already"
    return ""


def _geometry_obstacle(layer: Any) -> str:
    if isinstance(layer, _CONVOLUTIONS):
        if layer.groups != 1:
            return f"a grouped convolution ({layer.groups} groups): channels belong to their group"
        if layer.padding == "causal":
            return "a causal convolution pads its input itself"
    if isinstance(layer, keras.layers.EinsumDense) and _plain_product(layer) is None:
        return f"its equation {layer.equation} is no plain product"
    return ""


def _routing_obstacle(unit: LayerUnit) -> str:
    for part in unit.path.split("/"):
        if _ROUTER_NAMES.match(part):
            return f"{part!r} looks like a router: a rounding could flip what it chooses"
    parent = unit.parent.layer if unit.parent is not None else None
    if parent is not None and (called := _CHOICE_CALLS.search(_source(parent))):
        return f"its parent's call uses {called[1]}: a rounding could flip what is chosen"
    return ""


def _source(layer: Any) -> str:
    if type(layer).__module__.split(".")[0] == "keras":
        return ""
    try:
        return inspect.getsource(type(layer).call)
    except (OSError, TypeError):
        return ""


def _padded_kind(layer: Any) -> Any:
    kinds = (keras.layers.Dense, keras.layers.EinsumDense, *_CONVOLUTIONS, keras.layers.Embedding)
    return next((kind for kind in kinds if isinstance(layer, kind)), keras.layers.Layer)


def _wrapper_of(layer: Any) -> Callable[..., Any]:
    if isinstance(layer, _CONVOLUTIONS):
        return PaddedConv
    if isinstance(layer, keras.layers.EinsumDense):
        return PaddedEinsum
    if isinstance(layer, keras.layers.Dense):
        return PaddedDense
    if isinstance(layer, keras.layers.Embedding):
        return PaddedEmbedding
    return _UnknownLayer


def _sizes(layer: Any) -> tuple[tuple[str, int], ...]:
    """Return the dimensions that padding would change."""
    if isinstance(layer, keras.layers.Embedding):
        return (("output_dim", int(layer.output_dim)),)
    if not getattr(layer, "built", False):
        return ()
    if isinstance(layer, keras.layers.Dense):
        return (("inputs", int(layer.kernel.shape[0])), ("units", int(layer.units)))
    if isinstance(layer, _CONVOLUTIONS):
        return (("channels", int(layer.kernel.shape[-2])), ("filters", int(layer.filters)))
    if isinstance(layer, keras.layers.EinsumDense):
        product = _plain_product(layer)
        return () if product is None else (("inputs", product[1]), ("outputs", product[2]))
    return ()


def _describe(unit: LayerUnit, multiple: int) -> PaddedLayer:
    sizes = tuple((name, size, size + -size % multiple) for name, size in _sizes(unit.layer))
    return PaddedLayer(unit.path, unit.kind, sizes)


def _plain_product(layer: Any) -> tuple[int, int, int] | None:
    """Return how many trailing axes an EinsumDense sums over, their size, and its output's.

    An equation such as "abc,cde->abde" is a matrix product once its axes are joined: the input is
    its leading axes, then the summed ones; the kernel the summed ones, then the new ones.
    """
    left, _, result = layer.equation.replace("...", "").partition("->")
    given, _, kernel = left.partition(",")
    for summed in range(1, min(len(given), len(kernel)) + 1):
        lead = given[: len(given) - summed]
        if given[-summed:] == kernel[:summed] and lead + kernel[summed:] == result:
            shape = [int(length) for length in layer.kernel.shape]
            return summed, math.prod(shape[:summed]), math.prod(shape[summed:])
    return None


def _pad_end(value: Any, **amounts: int) -> Any:
    """Add zeros at the end of axes, named `last`, `before_last` or `second`."""
    axes = {"last": -1, "before_last": -2, "second": 1}
    rank = len(value.shape)
    widths = [[0, 0] for _ in range(rank)]
    for name, amount in amounts.items():
        widths[axes[name] % rank][1] = amount
    return ops.pad(value, widths) if any(after for _, after in widths) else value


def padded_product(inputs: Any, kernel: Any, multiple: int) -> Any:
    """Compute `inputs @ kernel` with both of the kernel's dimensions padded to `multiple`."""
    width, units = int(kernel.shape[0]), int(kernel.shape[1])
    more, beyond = -width % multiple, -units % multiple
    result = ops.matmul(
        _pad_end(inputs, last=more), _pad_end(kernel, before_last=more, last=beyond)
    )
    return result[..., :units] if beyond else result


class _Padded(Hook):
    """A layer's `call`, computed at aligned sizes."""

    def __init__(self, layer: Any, multiple: int) -> None:
        super().__init__(layer.call)
        self.layer, self.multiple = layer, multiple

    def _add_bias_and_activate(self, result: Any, bias: Any) -> Any:
        if bias is not None:
            result = ops.add(result, bias)
        activation = self.layer.activation
        return result if activation is None else activation(result)


class _UnknownLayer(_Padded):
    """Stands for a layer that padding does not know."""


class PaddedDense(_Padded):
    """Dense with padded inputs and units."""

    def __call__(self, inputs: Any, training: Any = None) -> Any:
        """Compute the layer; shapes as in Dense."""
        result = padded_product(inputs, ops.convert_to_tensor(self.layer.kernel), self.multiple)
        return self._add_bias_and_activate(result, self.layer.bias)


class PaddedEinsum(_Padded):
    """EinsumDense, such as attention's projections, with its joined dimensions padded."""

    def __call__(self, inputs: Any, training: Any = None) -> Any:
        """Compute the layer; shapes as in EinsumDense."""
        summed, width, units = _plain_product(self.layer) or (0, 0, 0)
        kernel = ops.convert_to_tensor(self.layer.kernel)
        lead = ops.shape(inputs)[: len(inputs.shape) - summed]
        flat = ops.reshape(inputs, (*lead, width))
        result = padded_product(flat, ops.reshape(kernel, (width, units)), self.multiple)
        result = ops.reshape(result, (*lead, *kernel.shape[summed:]))
        return self._add_bias_and_activate(result, self.layer.bias)


class PaddedConv(_Padded):
    """An ungrouped convolution with padded channels and filters."""

    def __call__(self, inputs: Any) -> Any:
        """Compute the layer; shapes as in Conv1D, 2D and 3D."""
        layer = self.layer
        kernel = ops.convert_to_tensor(layer.kernel)
        more = -int(kernel.shape[-2]) % self.multiple
        beyond = -int(kernel.shape[-1]) % self.multiple
        last = layer.data_format == "channels_last"
        inputs = _pad_end(inputs, **{"last" if last else "second": more})
        result = layer.convolution_op(inputs, _pad_end(kernel, before_last=more, last=beyond))
        if beyond:
            filters = int(layer.filters)
            result = result[..., :filters] if last else result[:, :filters]
        bias = layer.bias if layer.use_bias else None
        if bias is not None and not last:
            bias = ops.reshape(bias, (1, -1, *([1] * layer.rank)))
        return self._add_bias_and_activate(result, bias)


class PaddedEmbedding(_Padded):
    """Embedding with a padded output dimension."""

    def __call__(self, inputs: Any) -> Any:
        """Look the indices up; shapes as in Embedding."""
        width = int(self.layer.output_dim)
        table = ops.convert_to_tensor(self.layer.embeddings)
        if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
            inputs = ops.cast(inputs, "int32")
        rows = ops.take(_pad_end(table, last=-width % self.multiple), inputs, axis=0)
        return ops.cast(rows[..., :width], self.layer.compute_dtype)
