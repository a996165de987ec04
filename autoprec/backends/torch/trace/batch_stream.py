"""The same batches for every run that is compared, from data that may not be reproducible.

Batches are drawn once per batch size and seed, kept on the CPU within a budget, and handed out as
copies. Beyond the budget they are drawn again and compared by hash; where `build_data` gives other
data the second time, the kept ones are replayed in a cycle, and the stream is not `reproducible`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autoprec.backends.protocol import Task
from autoprec.backends.torch.apply.tensors import tensors_in
from autoprec.backends.torch.train.task_runner import batches, move

MAX_KEPT_BYTES = 1 << 30
"""How much data one stream keeps in memory before it draws again instead."""

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


class BatchStream:
    """Batch 0, 1, 2, ... of one batch size and seed: always the same ones."""

    def __init__(self, task: Task, batch_size: int, seed: int, keep_bytes: int = MAX_KEPT_BYTES):
        self._task, self._batch_size, self._seed = task, batch_size, seed
        self._budget = keep_bytes
        self._kept: list[Any] = []
        self._pinned: dict[int, Any] = {}
        self._hashes: list[str] = []
        self._live: Iterator[Any] | None = None
        self._position = 0
        self.reproducible = True
        self._start()

    def batch(self, index: int, *, pin: bool = False) -> Any:
        """Return a copy of batch `index` on the CPU; `pin` keeps it whatever the budget says."""
        if index < len(self._kept):
            return copy.deepcopy(self._kept[index])
        if index in self._pinned:
            return copy.deepcopy(self._pinned[index])
        batch = self._draw(index)
        if pin:
            self._pinned[index] = copy.deepcopy(batch)
        return batch

    def kept_batches(self, count: int) -> Iterator[Any]:
        """Copy the first batches, at most `count`, as far as they are kept in memory."""
        return (copy.deepcopy(batch) for batch in self._kept[:count])

    def close(self) -> None:
        """End the data's iterator and its worker processes."""
        close = getattr(self._live, "close", None)
        if close is not None:
            close()
        self._live = None

    def _start(self) -> None:
        """Keep the first batch, and see whether it is the same when drawn again."""
        first = self._draw(0)
        self._restart()
        again = next(self._iterator())
        self.reproducible = digest(first) == digest(again)
        self._position = 1
        if not self.reproducible:
            self._kept[0] = self._detached(again)
            self._hashes[0] = digest(again)

    def _draw(self, index: int) -> Any:
        if index < self._position:
            self._restart()
        while True:
            if not self.reproducible and self._budget <= 0:
                return copy.deepcopy(self._kept[index % len(self._kept)])
            batch = self._detached(next(self._iterator()))
            self._note(batch)
            if self._position > index:
                return copy.deepcopy(batch)

    def _note(self, batch: Any) -> None:
        """Count a drawn batch, compare it with the last time, and keep it if there is room."""
        position, mark = self._position, digest(batch)
        self._position += 1
        if position < len(self._hashes):
            if self._hashes[position] != mark:
                self.reproducible, self._budget = False, 0
            return
        self._hashes.append(mark)
        if position == len(self._kept) and self._budget > 0:
            self._kept.append(batch)
            self._budget -= size_in_bytes(batch)

    def _detached(self, batch: Any) -> Any:
        return move(batch, "cpu")

    def _restart(self) -> None:
        self.close()
        self._position = 0

    def _iterator(self) -> Iterator[Any]:
        if self._live is None:
            self._live = batches(self._task, self._batch_size, self._seed, repeat=True)
        return self._live
