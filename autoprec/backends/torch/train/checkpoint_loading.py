"""Loads the weights of a checkpoint file into a freshly built model.

A file may hold a state dict, or one in a dictionary next to an optimizer's and a step count, as
training loops save it. Nothing in it is unpickled but tensors and plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoprec.errors import TaskError

_STATE_DICT_KEYS = (
    "model",
    "state_dict",
    "model_state_dict",
    "model_state",
    "module",
    "net",
    "weights",
)
"""Under which a training loop, Lightning, timm or DeepSpeed keeps the state dict."""

_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.")
"""What DDP, torch.compile and a LightningModule put before the name of every weight."""

_SHOWN_WEIGHTS = 3


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a checkpoint's weights into `model`, in place; `TaskError` where they do not fit.

    Every parameter and persistent buffer must be there, and nothing else.
    """
    state = _unwrapped(_state_in(_read(path), path), model)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # a shape that differs
        lines = str(error).strip().splitlines()
        raise TaskError(
            f"{path.name} does not fit the model of build_model: {lines[-1].strip()}"
        ) from error
    if missing or unexpected:
        raise TaskError(
            f"{path.name} does not fit the model of build_model: "
            + "; ".join(
                f"{len(names)} weight{'s' if len(names) > 1 else ''} {what}, such as "
                + ", ".join(names[:_SHOWN_WEIGHTS])
                for names, what in (
                    (missing, "missing in the file"),
                    (unexpected, "unknown to the model"),
                )
                if names
            )
        )


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises whatever its bytes lead to
        raise TaskError(
            f"{path.name} cannot be read as weights alone: it is damaged, no file of torch.save, "
            "or it holds Python objects, which would be run; save model.state_dict() instead"
        ) from error


def _read_safetensors(path: Path) -> Any:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise TaskError(
            f"{path.name} needs the package safetensors: pip install safetensors"
        ) from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise TaskError(f"{path.name} cannot be read as safetensors: {error}") from error


def _state_in(found: Any, path: Path) -> Mapping[str, torch.Tensor]:
    """Find the state dict in a file's content."""
    inside = (
        [found[name] for name in _STATE_DICT_KEYS if name in found] if _is_mapping(found) else []
    )
    for state in (*inside, found):
        if _is_mapping(state) and state and any(_is_weight(value) for value in state.values()):
            return {name: value for name, value in state.items() if _is_weight(value)}
    held = ", ".join(map(repr, list(found)[:6])) if _is_mapping(found) else type(found).__name__
    raise TaskError(
        f"{path.name} holds no state dict (found {held}); expected what model.state_dict() gives, "
        f"or that under one of {', '.join(map(repr, _STATE_DICT_KEYS))}"
    )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _unwrapped(state: Mapping[str, torch.Tensor], model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Strip the prefixes that wrappers put before all of a state's names."""
    own = set(model.state_dict())
    for wrapper in _WRAPPER_PREFIXES * 2:
        if own & set(state) or not all(name.startswith(wrapper) for name in state):
            continue
        state = {name.removeprefix(wrapper): value for name, value in state.items()}
    return state
