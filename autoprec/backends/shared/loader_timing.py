"""Times a loader at the pace that it keeps up, with the workers that it has.

Workers load side by side, so that batches come in bursts: as many as there are workers at once, and
then none for as long as one takes to load. The first burst has been loaded before anybody waits for
it. The pace is that from one batch which was waited for to another, over several bursts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

_BURSTS = 4
"""A loader is timed over so many bursts; one without workers brings each batch by itself.

Batches that come much faster than the first are those of workers, which may still be starting: then
half a second is not cut short.
"""

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
    took = arrivals[-1] - arrivals[0]
    if took > min(_MOST_SECONDS, max(_SECONDS, 2 * first_seconds)):
        return True
    waits = _waits(arrivals)
    if len(waits) < _BURSTS or arrivals[waits[-1]] - arrivals[waits[-1] - 1] < _LEAST_WAIT_SECONDS:
        return False
    alone = took >= 0.5 * first_seconds * (len(arrivals) - 1)
    return alone or took > _SECONDS


def seconds_per_batch(arrivals: Sequence[float]) -> float:
    """Return the loader's seconds for a batch from the times at which batches came, two at least.

    They count up to the last that was waited for; what came after it is a part of a burst. Where
    there are several, they count from after a third, for workers start one after another.
    """
    waits, last = _waits(arrivals), len(arrivals) - 1
    end = waits[-1] if waits and 2 * waits[-1] >= last else last
    later = [place for place in waits if end <= 3 * place and place < end]
    begin = later[0] if len(later) >= _BURSTS - 1 else 0
    return (arrivals[end] - arrivals[begin]) / (end - begin)


def arrivals_after(seconds: Sequence[float]) -> list[float]:
    """Return the times at which batches came from the seconds that each took after the other."""
    return list(accumulate(seconds))


def _waits(arrivals: Sequence[float]) -> list[int]:
    """Return the places of the batches that were waited for: half as long as the longest wait."""
    gaps = [after - before for before, after in pairwise(arrivals)]
    longest = max(gaps, default=0.0)
    return [place for place, gap in enumerate(gaps, 1) if longest > 0 and gap >= longest / 2]
