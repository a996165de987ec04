"""Faults at chosen operators: the libraries' own messages, and a context that is lost after some.

A fault names an operator ("mm", "index_put"), and may name a dtype of one of its tensors, which
call of it fails (`nth`, from 1; without it all do), and a file: with `once` only the first process
that gets there is hit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pretended import settings

_MESSAGES = {
    "cublas": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "engine": "unable to find an engine to execute this computation",
    "illegal": "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call",
    "launch": "CUDA error: unspecified launch failure",
    "lost": "CUDA error: device lost",
}
_POISONS = ("illegal", "launch", "lost")

_calls: dict[int, int] = {}
_poison: list[str] = []


def check(func: Any, tensors: list[torch.Tensor]) -> None:
    """Raise what is to go wrong at this operator; whatever is called once a context is lost."""
    if _poison:
        raise RuntimeError(_poison[0])
    for number, fault in enumerate(settings.FAULTS):
        if fault["op"] != func.name().split("::")[1].split(".")[0]:
            continue
        dtype = fault.get("dtype")
        if dtype is not None and not any(str(t.dtype) == f"torch.{dtype}" for t in tensors):
            continue
        _calls[number] = _calls.get(number, 0) + 1
        if fault.get("nth") not in (None, _calls[number]):
            continue
        if fault.get("once"):
            try:
                Path(settings.FOLDER, f"fault-{number}").open("x").close()
            except FileExistsError:
                continue
        message = _MESSAGES.get(fault["error"], fault["error"])
        if fault["error"] in _POISONS:
            _poison.append(message)
        raise RuntimeError(message)
