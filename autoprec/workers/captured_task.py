"""What a captured task is in words, and a fingerprint of it for its digest.

A script's code does not say all that it trains: it may read a file of settings. So what it made is
part of its digest: names, shapes and types of the parameters, the batch, the optimizer's settings.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from autoprec.backends.protocol import Task

#: Sizes that differ between so many batches, such as a padded length, do not count.
_BATCHES = 2


def describe_captured(task: Task, optimizer: Any) -> str:
    """Say with which batch and optimizer a task is trained: "batch 64, AdamW"."""
    batch = [] if task.batch_size is None else [f"batch {task.batch_size}"]
    return ", ".join([*batch, type(optimizer).__name__])


def optimizer_of(task: Task, model: Any) -> Any:
    """Return a new optimizer for a model of the task, or the one that the model has itself."""
    if task.build_optimizer is not None:
        return task.build_optimizer(model)
    return getattr(model, "optimizer", None)


def fingerprint_of(task: Task, model: Any, optimizer: Any, made_by: str) -> str:
    """Hash (SHA-256) what was captured: model, batch, optimizer, clipping, and what `made_by`."""
    said = {
        "made_by": made_by,
        "model": [type(model).__qualname__, *_weights_of(model)],
        "optimizer": [type(optimizer).__qualname__, _settings_of(optimizer)],
        "batch": [task.batch_size, _structure_of(task)],
        "clip_grad_norm": task.clip_grad_norm,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _weights_of(model: Any) -> list[list[str]]:
    """List name, shape and type of every parameter and buffer."""
    if hasattr(model, "named_parameters"):
        named: Iterable[tuple[str, Any]] = [
            *((name, each) for name, each in model.named_parameters()),
            *((name, each) for name, each in model.named_buffers()),
        ]
    else:
        named = [(each.path, each) for each in getattr(model, "weights", ())]
    return [
        [name, str(tuple(each.shape)), str(each.dtype), str(getattr(each, "requires_grad", ""))]
        for name, each in named
    ]


def _settings_of(optimizer: Any) -> Any:
    groups = getattr(optimizer, "param_groups", None)
    if groups is not None:
        return [
            {name: len(each[name]) if name == "params" else _plain(each[name]) for name in each}
            for each in groups
        ]
    get_config = getattr(optimizer, "get_config", None)
    return None if get_config is None else _plain(get_config())


def _structure_of(task: Task) -> Any:
    """Describe the first batches at the task's own size: what is in them, without the values."""
    if task.batch_size is None:
        return None
    try:
        drawn = list(itertools.islice(iter(task.build_data(task.batch_size)), _BATCHES))
    except Exception:  # the first step says it better
        return None
    found = [_parts_of(each) for each in drawn]
    if not found:
        return None
    return {
        name: part if all(each.get(name) == part for each in found) else part[:1]
        for name, part in found[0].items()
    }


def _parts_of(batch: Any, name: str = "") -> dict[str, list[str]]:
    """Return type and shape of every array in a batch, by its place there."""
    if isinstance(batch, Mapping):
        pairs: Iterable[tuple[Any, Any]] = batch.items()
    elif isinstance(batch, list | tuple):
        pairs = enumerate(batch)
    elif hasattr(batch, "shape") and hasattr(batch, "dtype"):
        return {name: [f"{batch.dtype}, {len(batch.shape)} dimensions", str(tuple(batch.shape))]}
    else:
        return {name: [type(batch).__qualname__]}
    found: dict[str, list[str]] = {}
    for key, each in pairs:
        found |= _parts_of(each, f"{name}/{key}")
    return found


def _plain(value: Any) -> Any:
    """Return what JSON knows of a value; of anything else its type."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number in a tensor
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__qualname__
