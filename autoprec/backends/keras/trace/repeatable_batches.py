"""A Keras task's batches for `autoprec.backends.shared.repeatable_batches`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import keras

from autoprec.backends.keras.train.batch_views import copy_leaf, survey
from autoprec.backends.keras.train.data import batches, digest, size_in_bytes, to_tensors
from autoprec.backends.protocol import Task
from autoprec.backends.shared.batch_survey import TIMED_AGAIN
from autoprec.backends.shared.repeatable_batches import MAX_KEPT_BYTES, BatchStream


class KerasBatches:
    """See `BatchOperations`: batches are stored as they come, and handed out as tensors."""

    def store(self, batch: Any) -> Any:
        """Copy every array that the user could change."""
        return keras.tree.map_structure(copy_leaf, batch)

    def hand_out(self, stored: Any) -> Any:
        """Return the batch as new tensors."""
        return to_tensors(keras.tree.map_structure(copy_leaf, stored))

    def digest(self, stored: Any) -> str:
        """Return a hash of the batch."""
        return digest(stored)

    def size_in_bytes(self, stored: Any) -> int:
        """Return the bytes of all arrays in the batch."""
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
        seen = survey(task, batch_size, seed, limits)
        return [seen.kept[index] for index in seen.largest()]

    draw = partial(batches, task, batch_size, seed, repeat=True)
    return BatchStream(draw, KerasBatches(), keep_bytes, elsewhere)
