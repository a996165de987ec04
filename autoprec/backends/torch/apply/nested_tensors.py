"""Finding, casting and laying out tensors that are nested in whatever a model takes or returns.

Tuples (named ones too), lists, mappings (Hugging Face's outputs too) and dataclasses are walked;
anything else is passed on as it is. A container none of whose tensors changes is returned itself,
never a copy. Only looking for tensors (`tensors_in`) also goes into the attributes of objects, and
`float32_results`, which casts what a model returns.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.dtypes import FULL_DTYPES


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors nested in `value`, in order; enter what refers to itself only once."""
    return _tensors_in(value, ())


def _tensors_in(value: Any, outside: tuple[int, ...]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in outside:
        for _, item in items_in(value):
            yield from _tensors_in(item, (*outside, id(value)))


def items_in(value: Any) -> list[tuple[Any, Any]]:
    """Return what a container or an object holds, by key, index or attribute; a leaf holds none."""
    if isinstance(value, torch.Tensor | str | bytes | int | float | None):
        return []
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        return list(vars(value).items())
    return []


def with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    """Return a copy of the container or object `value` that holds `items` instead of its own."""
    if type(value) is dict:
        return dict(items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items.values())
    if isinstance(value, list | tuple):
        return type(value)(items.values())
    clone = copy.copy(value)
    for key, item in items.items():
        if isinstance(value, Mapping):
            clone[key] = item
        else:
            object.__setattr__(clone, key, item)
    return clone


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `function` to every tensor in `value`, keeping the containers' types."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        return _map_mapping(function, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(function, value)
    return value


def _map_mapping(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed = {}
    for key, item in value.items():
        new = map_tensors(function, item)
        if new is not item:
            changed[key] = new
    if not changed:
        return value
    result = dict(value) if type(value) is dict else copy.copy(value)
    for key, item in value.items():  # a copy that torch.compile makes does not hold all of them
        result[key] = changed.get(key, item)
    return result


def _map_dataclass(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name, None)
        new = map_tensors(function, item)
        if new is not item:
            changed[field.name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(result, name, item)
    return result


def copy_deeply(value: Any) -> Any:
    """Copy `value` with all that it holds; of a tensor that is a part of a larger one that part.

    `copy.deepcopy` copies the whole of it: all data, where a batch is a slice of them. Of a nested
    tensor it copies the offsets, too, by which torch knows tensors of the same rows.
    """
    parts: dict[int, Any] = {}
    for tensor in tensors_in(value):
        if tensor.is_nested or _is_part(tensor):
            parts[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    try:
        return copy.deepcopy(value, parts)
    except Exception:  # attributes of a batch that are its entries: a KeyError for "__deepcopy__"
        return _copy_items(value)


def _copy_items(value: Any) -> Any:
    """Copy containers and objects one by one, and their tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    items = items_in(value)
    return with_items(value, {key: _copy_items(item) for key, item in items}) if items else value


def _is_part(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is one of plain numbers, in a larger memory than its own."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_leaf
    if not plain or tensor.is_nested or tensor.is_meta or 0 in tensor.stride():
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def to_float32(value: Any) -> Any:
    """Cast every 16-bit tensor in `value` up to float32."""
    if type(value) in (tuple, dict):  # what a module is called with: mostly tensors to be left
        for each in value.values() if type(value) is dict else value:
            if not isinstance(each, torch.Tensor) or each.dtype in FULL_DTYPES:
                break
        else:
            return value
    return map_tensors(in_full_precision, value)


def in_full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a 16-bit tensor up; any other is returned itself."""
    dtype = FULL_DTYPES.get(tensor.dtype)
    return tensor if dtype is None else tensor.to(dtype)


def holds_containers_only(value: Any, depth: int = 16) -> bool:
    """Return whether `value` holds nothing but what `map_tensors` walks, numbers and strings.

    False below `depth`: a container may hold itself.
    """
    if isinstance(value, torch.Tensor | str | bytes | int | float | None):
        return True
    if depth == 0:
        return False
    if isinstance(value, tuple | list):
        return all(holds_containers_only(each, depth - 1) for each in value)
    if isinstance(value, MutableMapping):
        return all(holds_containers_only(each, depth - 1) for each in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = (getattr(value, each.name, None) for each in dataclasses.fields(value))
        return all(holds_containers_only(each, depth - 1) for each in own)
    return False


def to_channels_last(value: Any) -> Any:
    """Lay every 4-d floating-point tensor in `value` out as channels_last; no copy if it is."""
    return map_tensors(_channels_last, value)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4 or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
