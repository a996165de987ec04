"""Which batches a rank trains on.

Every rank calls `build_data` with the same seed. A task that does not know of ranks gives all of
them the same batches: each takes its turn, so that together they train on what one process would
accumulate. A task that shards its data itself (`DistributedSampler`) gives each its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from itertools import chain, islice
from typing import Any

from autoprec.backends.protocol import RankPlace, Task
from autoprec.backends.torch.distributed.communication import join
from autoprec.backends.torch.train.batch_digest import digest

_SHARED: dict[Any, bool] = {}
"""Whether ranks find the same batches, by `build_data`: asked once, whatever the batch size."""


def own_batches(
    task: Task, place: RankPlace, stream: Generator[Any, None, None]
) -> Generator[Any, None, None]:
    """Yield this rank's batches of `stream`: all, or every world-th where all ranks have the same.

    Ranks join before the first is drawn, for samplers that ask for their rank.
    """
    communication = join(place)
    with contextlib.closing(stream):
        for first in stream:
            if task.build_data not in _SHARED:
                _SHARED[task.build_data] = len(set(communication.gather(digest(first)))) == 1
            whole = chain((first,), stream)
            if _SHARED[task.build_data]:
                yield from islice(whole, place.rank, None, place.world_size)
            else:
                yield from whole
