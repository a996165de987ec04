"""Times a loader at the pace that it keeps up, with the workers that it has.

Workers load side by side, so that batches come in bursts: as many as there are workers at once, and
then none for as long as one takes to load. The first burst has been loaded before anybody waits for
it. The pace is that from one batch which was waited for to another, over several bursts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

_BURSTS = 4
"""A loader is timed over so many bursts; one without workers brings each batch by itself."""

_LEAST_WAIT_SECONDS = 0.002
"""Shorter waits show no bursts; a loader so fast is timed over a number of batches."""

_MOST_BATCHES = 48

_SECONDS = 0.5
_MOST_SECONDS = 5.0
"""A loader is timed for about half a second; for twice as long as its first batch took, which is
longer than any burst, but for no more than five seconds."""


def is_settled(arrivals: Sequence[float], first_seconds: float) -> bool:
    """Say whether the times at which batches came, in seconds, tell the loader's pace.

    `first_seconds` is what the first batch took, with the start of the workers.
    """
    if len(arrivals) > _MOST_BATCHES:
        return True
    limit = min(_MOST_SECONDS, max(_SECONDS, 2 * first_seconds))
    if arrivals[-1] - arrivals[0] > limit:
        return True
    waits = _waits(arrivals)
    return bool(
        len(waits) >= _BURSTS
        and arrivals[waits[-1]] - arrivals[waits[-1] - 1] >= _LEAST_WAIT_SECONDS
    )


def seconds_per_batch(arrivals: Sequence[float]) -> float:
    """Return the loader's seconds for a batch from the times at which batches came, two at least.

    They count up to the last that was waited for; what came after it is a part of a burst.
    """
    waits, last = _waits(arrivals), len(arrivals) - 1
    end = waits[-1] if waits and 2 * waits[-1] >= last else last
    return (arrivals[end] - arrivals[0]) / end


def arrivals_after(seconds: Sequence[float]) -> list[float]:
    """Return the times at which batches came from the seconds that each took after the other."""
    return list(accumulate(seconds))


def _waits(arrivals: Sequence[float]) -> list[int]:
    """Return the places of the batches that were waited for: half as long as the longest wait."""
    gaps = [after - before for before, after in pairwise(arrivals)]
    longest = max(gaps, default=0.0)
    return [place for place, gap in enumerate(gaps, 1) if longest > 0 and gap >= longest / 2]
