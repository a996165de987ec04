"""Settings that hold for the whole process: TF32, CPU threads, cuDNN's autotuner.

PyTorch has no narrower scope for them. `apply_profile` sets them until the profile is restored, or
another one applied to the model (`set_process_settings`, `release_process_settings`); a measurement
runs inside `process_settings_restored`, which restores all of them, even after an exception.

Reading and writing go through torch's older API (`allow_tf32`, `set_float32_matmul_precision`):
what it writes can be read through both, while a setting written through the newer
`fp32_precision` makes the older getters raise, and torch.compile's Inductor reads them. A process
that already uses the newer one keeps its own settings where they are not ours to change.

Intel GPUs have a switch of their own, `torch.backends.mkldnn.allow_tf32`, for products and
convolutions alike: ATen/native/mkldnn/xpu reads nothing else. A build without them keeps no such
setting, and reads as None.

`keep_memory` cannot be undone: measuring without it afterwards takes another process.

`implicit_bfloat16` rounds every float32 product of the process, an island's forward and backward
pass too, so it is not set for a recipe that keeps modules in float32.

A `float32` policy leaves TF32 as the process has it: by default off for matrix products and on for
cuDNN convolutions, which is what an untuned float32 run computes with.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoprec.backends.shared.process_memory import keep_freed_memory
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import KEEP_MEMORY, KnobValue, Recipe


@dataclass
class _Claims:
    """The process settings that the recipes of several models want.

    `wanted` are the settings of each model's recipe, `original` the values before the first of
    them, `left` those after the last one.
    """

    wanted: list[tuple[weakref.ref[nn.Module], dict[str, Any]]] = field(default_factory=list)
    original: dict[str, Any] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)


_CLAIMS = _Claims()

#: Two names of one setting: writing the one writes the other.
_SAME_SETTING = frozenset({"matmul_precision", "matmul_tf32"})

_EXACT: Mapping[str, Any] = {
    "matmul_precision": "highest",
    "cudnn_tf32": False,
    "onednn_tf32": False,
}

#: The settings that write the newer API's, too.
_PRECISION = _SAME_SETTING | {"cudnn_tf32", "onednn_tf32"}


def release_process_settings(model: nn.Module | None = None) -> None:
    """Undo what the recipes of `model`, and of models that no longer exist, have set.

    A setting that the user has changed since stays as it is, and so does one that another model's
    recipe wants, too.
    """
    gone = [claim for claim in _CLAIMS.wanted if claim[0]() in (None, model)]
    if not gone:
        return
    _CLAIMS.wanted = [claim for claim in _CLAIMS.wanted if claim not in gone]
    still = {setting for _, changes in _CLAIMS.wanted for setting in changes}
    theirs = {setting for setting in _READERS if _read(setting) != _CLAIMS.left[setting]}
    if theirs & _SAME_SETTING:
        theirs |= _SAME_SETTING
    unclaimed = {setting for _, changes in gone for setting in changes} - still - theirs
    _restore({setting: _CLAIMS.original[setting] for setting in _READERS if setting in unclaimed})
    if not (theirs | still) & _PRECISION:
        _restore({setting: _CLAIMS.original[setting] for setting in _NEWER_SETTINGS})
    _CLAIMS.left = read_process_settings()


def set_process_settings(
    recipe: Recipe, device: str, model: nn.Module | None = None
) -> tuple[str, ...]:
    """Set what `recipe` needs of the process on `device`, and name what was set.

    With a `model` they are recorded as its own, for `release_process_settings`.
    """
    changes = _changes(recipe, torch.device(device).type)
    if model is not None and changes:
        if not _CLAIMS.wanted:
            _CLAIMS.original = read_process_settings()
        _CLAIMS.wanted.append((weakref.ref(model), changes))
    for setting, value in changes.items():
        _write(setting, value)
    if model is not None and changes:
        _CLAIMS.left = read_process_settings()
    done = [f"{setting}={value}" for setting, value in changes.items()]
    if recipe.keeps_memory and torch.device(device).type == "cpu" and keep_freed_memory():
        done.append(f"{KEEP_MEMORY}=True")
    return tuple(done)


@contextmanager
def process_settings_restored(inside: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Restore every setting this module may change, whatever happens inside.

    What models' recipes want inside is forgotten with it. The settings are those of `inside` to
    begin with, if given: what `read_process_settings` returned.
    """
    before = read_process_settings()
    wanted, original, left = list(_CLAIMS.wanted), _CLAIMS.original, _CLAIMS.left
    try:
        _restore(inside or {})
        yield
    finally:
        _restore(before)
        _CLAIMS.wanted, _CLAIMS.original, _CLAIMS.left = wanted, original, left


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products in float32 inside: no TF32, nothing rounded to bfloat16."""
    with process_settings_restored():
        for setting, value in _EXACT.items():
            if _read(setting) not in (None, value):
                _write(setting, value)
        yield


def _restore(before: Mapping[str, Any]) -> None:
    """Write back what differs, the older API's settings first."""
    for setting, value in before.items():
        if value is not None and _read(setting) != value:
            _write(setting, value)


def _changes(recipe: Recipe, device_type: str) -> dict[str, Any]:
    """Return the settings `recipe` asks for, in the order in which they must be written."""
    knobs: Mapping[str, KnobValue] = recipe.knobs
    changes: dict[str, Any] = {}
    rounds = knobs.get("implicit_bfloat16") and not recipe.float32_modules
    if rounds and device_type == "cpu":
        changes["matmul_precision"] = "medium"
    if recipe.policy is Policy.TF32 and device_type == "cuda":
        changes["matmul_tf32"] = True
        changes["cudnn_tf32"] = True
    if recipe.policy is Policy.TF32 and device_type == "xpu":
        changes["onednn_tf32"] = True
    if "cudnn_benchmark" in knobs and device_type == "cuda":
        changes["cudnn_benchmark"] = bool(knobs["cudnn_benchmark"])
    if "threads" in knobs and device_type == "cpu":
        changes["threads"] = int(knobs["threads"])
    return changes


def _readable(read: Callable[[], Any]) -> Callable[[], Any]:
    """Read a setting, or None: the newer API may have made it unreadable, a build may lack it."""

    def attempt() -> Any:
        try:
            return read()
        except (AttributeError, RuntimeError):
            return None

    return attempt


def _write_matmul_tf32(value: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = value


def _write_cudnn_tf32(value: bool) -> None:
    torch.backends.cudnn.allow_tf32 = value


def _write_onednn_tf32(value: bool) -> None:
    torch.backends.mkldnn.allow_tf32 = value  # type: ignore[assignment]


def _write_cudnn_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


_READERS: Mapping[str, Callable[[], Any]] = {
    "matmul_precision": _readable(torch.get_float32_matmul_precision),
    "matmul_tf32": _readable(lambda: torch.backends.cuda.matmul.allow_tf32),
    "cudnn_tf32": _readable(lambda: torch.backends.cudnn.allow_tf32),
    "onednn_tf32": _readable(lambda: torch.backends.mkldnn.allow_tf32),
    "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
    "threads": torch.get_num_threads,
}

_WRITERS: Mapping[str, Callable[[Any], None]] = {
    "matmul_precision": torch.set_float32_matmul_precision,
    "matmul_tf32": _write_matmul_tf32,
    "cudnn_tf32": _write_cudnn_tf32,
    "onednn_tf32": _write_onednn_tf32,
    "cudnn_benchmark": _write_cudnn_benchmark,
    "threads": torch.set_num_threads,
}

# The newer API's view of the same settings (torch >= 2.9). It tells "none" (never set) from "ieee"
# (set to full precision), which the older one cannot, so it is what makes a restore exact.
_NEWER_SETTINGS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul")


def read_process_settings() -> dict[str, Any]:
    """Read every setting, the older API's first: what it writes changes the newer one's."""
    return {setting: _read(setting) for setting in (*_READERS, *_NEWER_SETTINGS)}


def _read(setting: str) -> Any:
    return _READERS[setting]() if setting in _READERS else _read_precision(setting)


def _write(setting: str, value: Any) -> None:
    if setting in _WRITERS:
        _WRITERS[setting](value)
    else:
        _write_precision(setting, value)


def _owner(path: str) -> Any:
    owner: Any = torch.backends
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def _read_precision(path: str) -> str | None:
    try:
        return str(_owner(path).fp32_precision)
    except (AttributeError, RuntimeError):
        return None


def _write_precision(path: str, precision: str) -> None:
    _owner(path).fp32_precision = precision
