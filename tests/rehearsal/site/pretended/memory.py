"""The memory of pretended GPUs: counted by storage, cached when freed, limited, and shared.

A storage on a GPU has one block, which every tensor on it holds; when the last is gone, its bytes
are free. The caching allocator keeps them: `reserved` falls only when the cache is emptied. What
other processes of the same rehearsal hold stands in files, one for each process and GPU.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

import torch

from pretended import settings

#: The size in which the caching allocator takes memory from the driver.
_SEGMENT = 2 * 2**20
_MIB = 2**20


class Block:
    """The bytes of one storage on one GPU, counted while the block lives."""

    def __init__(self, books: Books, size: int) -> None:
        self._books, self._size = books, size
        books.take(size)

    def __del__(self) -> None:
        self._books.allocated -= self._size


class Books:
    """What is known of one GPU's memory, in bytes, by this process."""

    def __init__(self, index: int, gpu: dict) -> None:
        self.index, self.total, self._strangers = index, gpu["bytes"], gpu["others"]
        self.allocated = self.reserved = self.peak = self.peak_reserved = 0
        self.fraction = 1.0
        self._uuid = gpu["uuid"]
        self.name_own()
        self._blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()

    def name_own(self) -> None:
        """Name the file in which this process says what it holds."""
        self._own = Path(settings.FOLDER, f"{self._uuid}.{os.getpid()}")

    def block(self, tensor: torch.Tensor) -> Block | None:
        """The block of a tensor's storage; a new one where the storage has none yet."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return None
        place = storage.data_ptr()
        found = self._blocks.get(place)
        if found is None:
            found = self._blocks[place] = Block(self, storage.nbytes())
        return found

    def take(self, size: int) -> None:
        """Count bytes as allocated; torch.OutOfMemoryError beyond the limit."""
        after = self.allocated + size
        reserved = max(self.reserved, -(-after // _SEGMENT) * _SEGMENT)
        if reserved > self.reserved:
            limit = min(int(self.total * self.fraction), self.total - self.others())
            if reserved > limit:
                self.allocated += size  # the block that never came to be takes it off again
                raise torch.OutOfMemoryError(self._message(size))
            self.reserved = reserved
            self._publish()
        self.allocated = after
        self.peak, self.peak_reserved = max(self.peak, after), max(self.peak_reserved, reserved)

    def _message(self, size: int) -> str:
        if settings.KIND == "mps":
            return (
                f"MPS backend out of memory (MPS allocated: {self.allocated / _MIB:.2f} MiB, other "
                f"allocations: 0.00 MiB, max allowed: {self.total / _MIB:.2f} MiB). Tried to "
                f"allocate {size / _MIB:.2f} MiB on private pool."
            )
        name = "XPU" if settings.KIND == "xpu" else "HIP" if settings.KIND == "rocm" else "CUDA"
        return (
            f"{name} out of memory. Tried to allocate {size / _MIB:.2f} MiB. GPU {self.index} has "
            f"a total capacity of {self.total / settings.GIB:.2f} GiB of which "
            f"{self.free() / _MIB:.2f} MiB is free."
        )

    def others(self) -> int:
        """What strangers and the other processes of this rehearsal hold."""
        held = self._strangers
        for path in self._own.parent.glob(f"{self._uuid}.*"):
            if path == self._own:
                continue
            with contextlib.suppress(OSError, ValueError):
                if Path("/proc", path.suffix[1:]).exists():
                    held += int(path.read_text() or 0)
        return held

    def free(self) -> int:
        """What the driver calls free: neither held by others nor cached here."""
        return max(0, self.total - self.others() - self.reserved)

    def empty_cache(self) -> None:
        """Give back what is cached."""
        self.reserved = -(-self.allocated // _SEGMENT) * _SEGMENT
        self._publish()

    def reset_peak(self) -> None:
        """Count peaks from here."""
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def statistics(self) -> dict:
        """The nested dictionary that torch._C._cuda_memoryStats gives, as far as it is read."""

        def all_of(current: int, peak: int) -> dict:
            return {"all": {"current": current, "peak": peak, "allocated": 0, "freed": 0}}

        return {
            "allocated_bytes": all_of(self.allocated, self.peak),
            "reserved_bytes": all_of(self.reserved, self.peak_reserved),
        }

    def _publish(self) -> None:
        self._own.write_text(str(self.reserved))


BOOKS = [Books(index, gpu) for index, gpu in enumerate(settings.GPUS)]


def _name_all() -> None:
    for books in BOOKS:
        books.name_own()


os.register_at_fork(after_in_child=_name_all)
