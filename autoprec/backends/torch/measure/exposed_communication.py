"""How much of a step waits for other ranks: micro-batches with and without reduction, in turn.

Under FSDP2 parameters are gathered in both, so that what is seen is the reduction of gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from autoprec.backends.torch.apply.precision import Precision
from autoprec.core.ratio import Ratio
from autoprec.core.speed.noise import paired_ratio

_ROUNDS = 8
_MIN_ROUNDS = 2


class CastOnly:
    """A recipe's autocast, without what it says of synchronising gradients."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context the forward pass runs in."""
        return self._precision.cast()


def exposed_communication(
    micro_batch: Callable[[], None],
    no_sync: Callable[[], AbstractContextManager[Any]],
    *,
    synchronize: Callable[[], None],
    slowest: Callable[[list[float]], list[float]],
    micro_batches: int,
    seconds: float,
) -> Ratio:
    """Return the share of an update, from 0 to 1, that the slowest rank waits for gradients.

    `micro_batch` runs forward and backward, and every rank runs it as often. An update has
    `micro_batches` of them and reduces once. It takes about `seconds`, but two rounds at least;
    the last pass synchronises.
    """

    def timed() -> float:
        start = time.perf_counter()
        micro_batch()
        synchronize()
        return time.perf_counter() - start

    with_it: list[float] = []
    without: list[float] = []
    for _ in range(1 + _ROUNDS):
        with no_sync():
            alone = timed()
        pair = slowest([alone, timed()])
        without.append(pair[0])
        with_it.append(pair[1])
        if len(with_it) > _MIN_ROUNDS and sum(with_it) + sum(without) > seconds:
            break
    return exposed_share(without[1:], with_it[1:], micro_batches)


def exposed_share(without: Sequence[float], with_it: Sequence[float], micro_batches: int) -> Ratio:
    """Return what share of an update the reduction takes, by rounds of single micro-batches.

    With a = with and b = without reduction that is (a - b) / (a + (n - 1) b) for n micro-batches.
    """
    found = paired_ratio(without, with_it)

    def share(ratio: float) -> float:
        return max(0.0, 1.0 - ratio) / (1.0 + (micro_batches - 1) * ratio)

    return Ratio(share(found.ratio), share(found.high), share(found.low), found.rounds)
