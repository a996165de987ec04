"""A torch task's batches for `autoprec.backends.shared.repeatable_batches`, kept on the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from autoprec.backends.protocol import Task
from autoprec.backends.shared.batch_survey import TIMED_AGAIN
from autoprec.backends.shared.repeatable_batches import MAX_KEPT_BYTES, BatchStream
from autoprec.backends.torch.apply.nested_tensors import copy_deeply
from autoprec.backends.torch.train.batch_digest import digest
from autoprec.backends.torch.train.batch_views import size_in_bytes, survey
from autoprec.backends.torch.train.task_runner import batches, move


class TorchBatches:
    """See `BatchOperations`."""

    def store(self, batch: Any) -> Any:
        """Copy the batch to the CPU."""
        return copy_deeply(move(batch, "cpu"))

    def hand_out(self, stored: Any) -> Any:
        """Copy a stored batch for one use."""
        return copy_deeply(stored)

    def digest(self, stored: Any) -> str:
        """Return a hash of the batch."""
        return digest(stored)

    def size_in_bytes(self, stored: Any) -> int:
        """Return the bytes of all tensors in the batch."""
        return size_in_bytes(stored)


def batch_stream(
    task: Task, batch_size: int, seed: int, keep_bytes: int = MAX_KEPT_BYTES
) -> BatchStream:
    """Return the task's batches of one size and seed.

    Large ones are looked for where a description of the task saw batches that differ in shape.
    """

    def elsewhere() -> list[Any]:
        if not task.surveyed:
            return []
        limits = replace(TIMED_AGAIN, batches=task.surveyed)
        seen, _ = survey(task, batch_size, seed, limits, compare_halves=False)
        return [seen.kept[index] for index in seen.largest()]

    draw = partial(batches, task, batch_size, seed, repeat=True)
    return BatchStream(draw, TorchBatches(), keep_bytes, elsewhere)
