"""Looks at the shapes of a task's batches, as training would draw them, and keeps a few of them.

The first batches say little of the rest: texts sorted by length begin with the shortest, and only
the first may be full. Batches stay where the loader puts them; none is moved to a device. A survey
ends after a number of batches, after some seconds, or with the data.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autoprec.backends.shared.loader_timing import arrivals_after, seconds_per_batch
from autoprec.core.number_words import plain_number

Shape = tuple[int, ...]

SAMPLES = -1
"""Stands in a shape for the dimension that counts samples: a short last batch is no other shape."""

_END = object()

_SPREAD_BATCHES = 32
"""How many batches are kept at even distances."""

_UNLIKE_BATCHES = 3
"""How many of the batches with the least similar halves are compared."""

_KEPT_UNLIKE = 4
"""How many of those are kept while more are looked at."""

_LEAST_BATCHES = 4
"""So many batches are looked at even where that takes longer than it should."""

_FEW_BATCHES = 32
"""A survey that time ends before this many batches is said to have seen little."""


@dataclass(frozen=True)
class Limits:
    """How far a survey goes: at most `batches`, in about `seconds`, keeping `kept_bytes`.

    It ends early where 4, 8, 16, ... were seen and as many again would take longer than `seconds`:
    a survey of the same data on a busier machine most likely ends at the same batch. The first
    batch, which starts workers, and the one that took longest, in which the machine may have done
    something else, are left out. Where loading is very slow it ends after ten times `seconds`.
    """

    batches: int = 400
    seconds: float = 2.0
    kept_bytes: int = 64 * 2**20

    def reached(self, spans: Sequence[float]) -> bool:
        """Say whether to stop after batches that took so many seconds each, looks included."""
        seen = len(spans)
        if sum(spans) > 10 * self.seconds:
            return True
        if seen < _LEAST_BATCHES or seen.bit_count() > 1:
            return False
        later = sorted(spans[1:])[:-1]
        return sum(later) * (1.0 + seen / len(later)) > self.seconds


DESCRIBED = Limits()
"""For the description of a task, once a tuning."""

TIMED = Limits(batches=128, seconds=1.0)
"""For each session that times steps, where nobody has said how many batches to look at."""

TIMED_AGAIN = Limits(seconds=4.0)
"""For sessions of a task whose batches are known to differ: so many are looked at as before."""


@dataclass(frozen=True)
class Look:
    """What is known of one batch: its place in the data, samples, bytes, and shapes by name.

    `unlikeness` says of each tensor how much its halves differ, from 0 for halves that look the
    same; it is empty where halves cannot be had.
    """

    index: int
    samples: int
    size: int
    shapes: Mapping[str, Shape]
    unlikeness: tuple[float, ...] = ()


class BatchView(Protocol):
    """What a framework sees in a batch; made for the first one."""

    def look(self, index: int, batch: Any) -> Look:
        """Describe a batch at its place in the data."""

    def copy(self, batch: Any) -> Any:
        """Copy a batch, which the loader may fill with other data."""


@dataclass(frozen=True)
class Survey:
    """What was seen: every look, the batches that were kept by their places, the loader's seconds.

    `stride` is the mean distance of those kept all over the data; `ended` says that there are no
    more batches, `cut_short` after how many seconds too few had been looked at (0: enough were).
    """

    looks: tuple[Look, ...]
    kept: Mapping[int, Any]
    stride: int
    seconds: tuple[float, ...]
    ended: bool
    cut_short: float = 0.0

    @property
    def varies(self) -> bool:
        """Say whether batches differ in shape, in more than their number of samples."""
        return any(look.shapes != self.looks[0].shapes for look in self.looks)

    @property
    def batches_to_look_at(self) -> int:
        """Return how many batches a session looks at for those to time; 0: the first ones do."""
        return len(self.looks) if self.varies else 0

    @property
    def loader_seconds(self) -> float:
        """Return the loader's seconds for a batch; the first, which starts workers, is left out."""
        if len(self.seconds) == 1:
            return self.seconds[0]
        return seconds_per_batch(arrivals_after(self.seconds))

    def largest(self) -> list[int]:
        """Return the places of the largest batch and of the longest in each length that varies."""
        found = {max(self.looks, key=lambda look: look.size).index}
        for name, axis, _, high in self._ranges():
            found.add(next(n.index for n in self.looks if _length(n, name, axis) == high))
        return sorted(index for index in found if index in self.kept)

    def mixture(self, count: int, most_bytes: int) -> list[int]:
        """Return the places of at most `count` batches that stand for all of them, by their size.

        They are the middles of as many equal parts of the kept ones in the order of their bytes.
        Short batches are left out, unless more than half are short.
        """
        spread = [self.looks[i] for i in sorted(self.kept) if _is_spread(i, self.stride)]
        if self.ended and len(spread) > 1 and spread[-1].index == len(self.looks) - 1:
            spread = spread[:-1] if spread[-1].samples < spread[0].samples else spread
        full = [look for look in spread if look.samples >= spread[0].samples]
        by_size = sorted(full if 2 * len(full) >= len(spread) else spread, key=lambda k: k.size)
        for parts in range(min(count, len(by_size)), 0, -1):
            chosen = [
                by_size[(2 * part + 1) * len(by_size) // (2 * parts)] for part in range(parts)
            ]
            if sum(look.size for look in chosen) <= most_bytes:
                break
        return sorted(look.index for look in chosen)

    def typical(self) -> int:
        """Return the place of the kept batch that is nearest to the mean in its bytes."""
        if not self.varies:
            return 0
        mean = sum(look.size for look in self.looks) / len(self.looks)
        full = [i for i in self.kept if self.looks[i].samples >= self.looks[0].samples]
        return min(full, key=lambda i: (abs(self.looks[i].size - mean), -self.looks[i].size, i))

    def representatives(self, count: int) -> list[int]:
        """Return the places of at most `count` kept batches of an even number of samples.

        The first comes first, then those whose halves are least alike, the largest, and others at
        even distances from the last backwards.
        """
        spread = [i for i in sorted(self.kept) if _is_spread(i, self.stride)]
        steps = max(1, len(spread) // count)
        order = [
            0,
            *self._unlike()[:_UNLIKE_BATCHES],
            *self.largest(),
            *spread[::-1][::steps],
            *spread,
        ]
        even = [i for i in dict.fromkeys(order) if i == 0 or self._has_halves(i)]
        return even[:count]

    def _unlike(self) -> list[int]:
        """Return the kept batches in which a tensor's halves differ most, the rarest first.

        Halves of noise always differ: what counts is how much more than in the mean batch.
        """
        looks = [self.looks[i] for i in self.kept]
        found: list[tuple[float, float, int]] = []
        for place in range(max(len(look.unlikeness) for look in looks)):
            mean = sum(_at(look, place) for look in self.looks) / len(self.looks)
            best = max(looks, key=lambda look: _at(look, place))
            if mean > 0.0:
                found.append((-_at(best, place) / mean, -_at(best, place), best.index))
        return list(dict.fromkeys(index for *_, index in sorted(found)))

    def _has_halves(self, index: int) -> bool:
        samples = self.looks[index].samples
        return samples >= 2 and samples % 2 == 0

    def variation(self) -> str:
        """Say in which lengths batches differ, and how much was seen; "" where they do not."""
        if not self.varies:
            return ""
        ranges = [
            f"{low} to {high} in dimension {axis} of {name}"
            for name, axis, low, high in self._ranges()
        ]
        more = f" and {len(ranges) - 2} more" if len(ranges) > 2 else ""
        which = " and ".join(ranges[:2]) or "tensors come and go"
        return f"batches differ in shape: {which}{more}, {self.extent()}"

    def extent(self) -> str:
        """Say how many batches were seen."""
        count = len(self.looks)
        return f"in all {count} batches" if self.ended else f"in the first {count} batches"

    def warnings(self) -> Iterator[str]:
        """Say what follows for the user from differing shapes, and from a survey cut short."""
        if self.varies:
            later = "" if self.ended else "; a longer one further on may need more"
            yield (
                f"{self.variation()}. Trials time a few of them that stand for all, and measure "
                f"memory at the largest{later}"
            )
        if self.cut_short:
            yield (
                f"only {len(self.looks)} batches were looked at, which took "
                f"{plain_number(self.cut_short, 2)} s: whether later ones differ in shape, or may "
                "not be split, is not known"
            )

    def _ranges(self) -> list[tuple[str, int, int, int]]:
        """List name, dimension, shortest and longest of the lengths that vary."""
        found: dict[tuple[str, int], list[int]] = {}
        for look in self.looks:
            for name, shape in look.shapes.items():
                for axis, length in enumerate(shape):
                    found.setdefault((name, axis), []).append(length)
        ranges = [(*key, min(lengths), max(lengths)) for key, lengths in found.items()]
        return [each for each in ranges if each[2] != each[3]]


def survey_batches(
    stream: Generator[Any, None, None], view_of: Callable[[Any], BatchView], limits: Limits
) -> Survey:
    """Look at the batches of `stream`, which ends with the data and is closed afterwards."""
    looks: list[Look] = []
    seconds: list[float] = []
    kept: _Kept | None = None
    spans: list[float] = []
    ended = late = False
    with contextlib.closing(stream):
        while len(looks) < limits.batches and not late:
            asked = time.perf_counter()
            batch = next(stream, _END)
            if batch is _END:
                ended = True
                break
            seconds.append(time.perf_counter() - asked)
            if kept is None:
                kept = _Kept(view_of(batch), limits.kept_bytes)
            looks.append(kept.offer(len(looks), batch))
            spans.append(time.perf_counter() - asked)
            late = limits.reached(spans)
    assert kept is not None  # a stream without any batch raises the task's error
    return Survey(
        tuple(looks),
        kept.batches,
        kept.stride,
        tuple(seconds),
        ended,
        sum(spans) if late and len(looks) < _FEW_BATCHES else 0.0,
    )


class _Kept:
    """The batches worth keeping of those seen so far.

    Those are the first, some at even distances, the largest, the longest in every dimension, and
    those whose halves are least alike.
    """

    def __init__(self, view: BatchView, most_bytes: int) -> None:
        self.batches: dict[int, Any] = {}
        self.stride = 1
        self._view, self._most_bytes = view, most_bytes
        self._sizes: dict[int, int] = {}
        self._largest = (-1, 0)
        self._longest: dict[tuple[str, int], tuple[int, int]] = {}
        self._unlike: dict[int, tuple[float, int]] = {}
        self._summed: dict[int, float] = {}

    def offer(self, index: int, batch: Any) -> Look:
        """Look at a batch, and keep a copy where it is wanted."""
        look = self._view.look(index, batch)
        self._note(look)
        if index in self._wanted([index]):
            self.batches[index] = self._view.copy(batch)
            self._sizes[index] = look.size
            while self._is_too_much():
                self.stride *= 2
        wanted = self._wanted(self.batches)
        self.batches = {i: kept for i, kept in self.batches.items() if i in wanted}
        return look

    def _note(self, look: Look) -> None:
        """Note what the batch is the first or the most of."""
        if look.size > self._largest[0]:
            self._largest = (look.size, look.index)
        for name, shape in look.shapes.items():
            for axis, length in enumerate(shape):
                if length > self._longest.get((name, axis), (SAMPLES, 0))[0]:
                    self._longest[name, axis] = (length, look.index)
        for place, unlikeness in enumerate(look.unlikeness):
            self._summed[place] = self._summed.get(place, 0.0) + unlikeness
            if unlikeness > self._unlike.get(place, (0.0, 0))[0]:
                self._unlike[place] = (unlikeness, look.index)

    def _wanted(self, indices: Iterable[int]) -> set[int]:
        records = {self._largest[1], *(index for _, index in self._longest.values())}
        rarest = sorted((-u / self._summed[at], i) for at, (u, i) in self._unlike.items())
        records |= {index for _, index in rarest[:_KEPT_UNLIKE]}
        return {i for i in indices if _is_spread(i, self.stride) or i in records}

    def _is_too_much(self) -> bool:
        spread = [i for i in self.batches if _is_spread(i, self.stride)]
        held = sum(self._sizes[i] for i in spread)
        return len(spread) > _SPREAD_BATCHES or (len(spread) > 1 and held > self._most_bytes)


def unlikeness_of(halves: Iterable[tuple[Any, Any]]) -> tuple[float, ...]:
    """Say of each pair of arrays how much two halves of a batch differ in what a loss may count.

    Three numbers from 0 to 1 each, the second for values that are no numbers, the third for the
    largest, by which a batch may be scaled. Compared are otherwise the shares of zeros, of negative
    and of positive numbers, how many there are, and their sums: padding, masks, ignored targets,
    one class of several, objects in lists, weights of samples.
    """
    return tuple(found for pair in halves for found in _differences(*pair))


def _differences(one: Any, other: Any) -> tuple[float, float, float]:
    sizes = [float(_count(one)), float(_count(other))]
    if not all(sizes):
        return 0.0 if sizes[0] == sizes[1] else 1.0, 0.0, 0.0
    parts = one * 1.0, other * 1.0  # truths are numbers, too
    zero, negative, positive = (
        [float(count.sum()) / size for count, size in zip(counts, sizes, strict=True)]
        for counts in zip(*((p == 0, p < 0, p > 0) for p in parts), strict=True)
    )
    sums, weights = ([float(each.sum()) for each in made] for made in (parts, map(abs, parts)))
    differences = [abs(sizes[0] - sizes[1]) / max(sizes)]
    differences += [abs(shares[0] - shares[1]) for shares in (zero, negative, positive)]
    if 0.0 < max(weights) < math.inf:
        differences.append(min(1.0, abs(sums[0] - sums[1]) / max(weights)))
    numbers = [sum(shares) for shares in zip(zero, negative, positive, strict=True)]
    largest = max(d for d in differences if not math.isnan(d))
    low, high = sorted(float(abs(part).max()) for part in parts)
    peak = 1.0 - low / high if high > 0.0 and math.isfinite(low + high) else 0.0
    return largest, abs(numbers[0] - numbers[1]), peak


def _at(look: Look, place: int) -> float:
    return look.unlikeness[place] if place < len(look.unlikeness) else 0.0


def _count(array: Any) -> int:
    count = 1
    for length in array.shape:
        count *= int(length)
    return count


_GOLDEN_RATIO = 0.6180339887498949


def _is_spread(index: int, stride: int) -> bool:
    """Say whether a place is one of every `stride`, spread evenly but in step with no period.

    Loaders take buckets of lengths in turn. What is left at twice the stride is a part of this.
    """
    return index * _GOLDEN_RATIO % 1.0 < 1.0 / stride


def _length(look: Look, name: str, axis: int) -> int | None:
    shape: Sequence[int] = look.shapes.get(name, ())
    return shape[axis] if axis < len(shape) else None
