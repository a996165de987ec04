"""Settings that hold for the whole process: TF32, CPU threads, cuDNN's autotuner.

PyTorch has no narrower place for them. `apply_profile` sets them once, for good (`set_globals`); a
measurement sets them inside `global_settings`, which restores every one of them, also after an
exception.

Reading and writing go through torch's older API (`allow_tf32`, `set_float32_matmul_precision`):
what it writes can be read through both, while a setting written through the newer
`fp32_precision` makes the older getters raise, and torch.compile's Inductor reads them. A process
that uses the newer one already is left with its own settings where they are not ours to change.

`keep_memory` cannot be taken back, here or anywhere: who measures without it after it needs another
process.

A `float32` policy leaves TF32 as the process has it: by default off for matrix products and on for
cuDNN convolutions, which is what an untuned float32 run computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from autoprec.backends.memory import keep_freed_memory
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import KEEP_MEMORY, KnobValue, Recipe


def set_globals(recipe: Recipe, device: str) -> tuple[str, ...]:
    """Set what `recipe` needs of the process on `device`, and name what was set."""
    changes = _changes(recipe, torch.device(device).type)
    for setting, value in changes.items():
        _WRITE[setting](value)
    done = [f"{setting}={value}" for setting, value in changes.items()]
    if recipe.keeps_memory and torch.device(device).type == "cpu" and keep_freed_memory():
        done.append(f"{KEEP_MEMORY}=True")
    return tuple(done)


@contextmanager
def global_settings(recipe: Recipe, device: str) -> Iterator[tuple[str, ...]]:
    """Set what `recipe` needs of the process, and restore all of it at the end."""
    with restored_globals():
        yield set_globals(recipe, device)


@contextmanager
def restored_globals() -> Iterator[None]:
    """Restore every setting this module may change, whatever happens inside."""
    before = {setting: read() for setting, read in _READ.items()}
    newer = {path: _read_precision(path) for path in _PRECISIONS}
    try:
        yield
    finally:
        for setting, value in before.items():
            if value is not None and _READ[setting]() != value:
                _WRITE[setting](value)
        for path, precision in newer.items():
            if precision is not None and _read_precision(path) != precision:
                _write_precision(path, precision)


def _changes(recipe: Recipe, device_type: str) -> dict[str, Any]:
    """Return the settings `recipe` asks for, in the order in which they must be written."""
    knobs: Mapping[str, KnobValue] = recipe.knobs
    changes: dict[str, Any] = {}
    if knobs.get("implicit_bfloat16") and device_type == "cpu":
        changes["matmul_precision"] = "medium"
    if recipe.policy is Policy.TF32 and device_type == "cuda":
        changes["matmul_tf32"] = True
        changes["cudnn_tf32"] = True
    if "cudnn_benchmark" in knobs and device_type == "cuda":
        changes["cudnn_benchmark"] = bool(knobs["cudnn_benchmark"])
    if "threads" in knobs and device_type == "cpu":
        changes["threads"] = int(knobs["threads"])
    return changes


def _readable(read: Callable[[], Any]) -> Callable[[], Any]:
    """Read a setting, or None where the newer API has made it unreadable."""

    def attempt() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return attempt


def _write_matmul_tf32(value: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = value


def _write_cudnn_tf32(value: bool) -> None:
    torch.backends.cudnn.allow_tf32 = value


def _write_cudnn_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


_READ: Mapping[str, Callable[[], Any]] = {
    "matmul_precision": _readable(torch.get_float32_matmul_precision),
    "matmul_tf32": _readable(lambda: torch.backends.cuda.matmul.allow_tf32),
    "cudnn_tf32": _readable(lambda: torch.backends.cudnn.allow_tf32),
    "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
    "threads": torch.get_num_threads,
}

_WRITE: Mapping[str, Callable[[Any], None]] = {
    "matmul_precision": torch.set_float32_matmul_precision,
    "matmul_tf32": _write_matmul_tf32,
    "cudnn_tf32": _write_cudnn_tf32,
    "cudnn_benchmark": _write_cudnn_benchmark,
    "threads": torch.set_num_threads,
}

# The newer API's view of the same settings (torch >= 2.9). It tells "none" (never set) from "ieee"
# (set to full precision), which the older one cannot, so it is what makes a restore exact.
_PRECISIONS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul")


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
