"""A torch task's batches for `autoprec.backends.shared.repeatable_batches`, kept on the CPU."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from autoprec.backends.protocol import Task
from autoprec.backends.shared.repeatable_batches import MAX_KEPT_BYTES, BatchStream
from autoprec.backends.torch.apply.nested_tensors import tensors_in
from autoprec.backends.torch.train.task_runner import batches, move

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


def size_in_bytes(batch: Any) -> int:
    """Return the bytes of all tensors in a batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))


class TorchBatches:
    """See `BatchOperations`."""

    def store(self, batch: Any) -> Any:
        """Copy the batch to the CPU."""
        return copy.deepcopy(move(batch, "cpu"))

    def hand_out(self, stored: Any) -> Any:
        """Copy a stored batch for one use."""
        return copy.deepcopy(stored)

    def digest(self, stored: Any) -> str:
        """Return a hash of the batch."""
        return digest(stored)

    def size_in_bytes(self, stored: Any) -> int:
        """Return the bytes of all tensors in the batch."""
        return size_in_bytes(stored)


def batch_stream(
    task: Task, batch_size: int, seed: int, keep_bytes: int = MAX_KEPT_BYTES
) -> BatchStream:
    """Return the task's batches of one size and seed."""
    return BatchStream(
        lambda: batches(task, batch_size, seed, repeat=True), TorchBatches(), keep_bytes
    )
