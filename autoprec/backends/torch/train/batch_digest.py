"""A hash of a batch, by which two draws of the same data are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from autoprec.backends.torch.apply.nested_tensors import tensors_in

HASHED_ELEMENTS = 1 << 16
"""Elements of one tensor that go into a batch's hash."""


def digest(batch: Any) -> str:
    """Return a hash of a batch: shapes, dtypes, and up to 65536 elements of every tensor."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors_in(batch):
        for part in _strided(tensor.detach()):
            flat = part.reshape(-1)
            flat = flat[:: max(1, flat.numel() // HASHED_ELEMENTS)].cpu().contiguous()
            state.update(f"{tuple(part.shape)}{part.dtype}".encode())
            state.update(flat.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _strided(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the plain tensors that a nested or sparse one consists of."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    return (tensor,)
