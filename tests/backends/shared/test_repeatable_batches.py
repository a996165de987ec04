"""A stream gives the same batches every time, whatever memory it may keep, or says it cannot."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from autoprec.backends.shared.repeatable_batches import BatchStream


class Lists:
    """Batches that are lists of one number."""

    def store(self, batch: list[int]) -> list[int]:
        return list(batch)

    def hand_out(self, stored: list[int]) -> list[int]:
        return list(stored)

    def digest(self, stored: list[int]) -> str:
        return str(stored)

    def size_in_bytes(self, stored: list[int]) -> int:
        return 8


def counting() -> Iterator[list[int]]:
    return ([index] for index in itertools.count())


def changing(same: int) -> Callable[[], Iterator[list[int]]]:
    """Data whose batches are others in each draw, but for the first ones."""
    draws = itertools.count()

    def draw() -> Iterator[list[int]]:
        turn = next(draws)
        return ([index if index < same else index + 100 * turn] for index in itertools.count())

    return draw


@pytest.mark.parametrize("budget", [0, 8, 24, 1 << 20])
def test_a_stream_gives_the_same_batches_whatever_it_keeps(budget):
    stream = BatchStream(counting, Lists(), budget)
    assert [stream.batch(index) for index in (0, 5, 3, 9, 2, 5)] == [[0], [5], [3], [9], [2], [5]]
    assert stream.reproducible


class Sized(Lists):
    """As large as their number says, but never smaller than two."""

    def size_in_bytes(self, stored: list[int]) -> int:
        return max(2, stored[0])


def test_the_largest_and_the_smallest_batch_are_told_where_they_differ_from_the_first():
    def draw() -> Iterator[list[int]]:
        return iter([[5], [5], [9], [5], [3]])

    stream = BatchStream(draw, Sized())
    assert stream.other_sizes() == []
    stream.batch(2)
    assert stream.other_sizes() == [("the largest batch", [9])]
    stream.batch(4)
    assert stream.other_sizes() == [("the largest batch", [9]), ("the smallest batch", [3])]
    wide = BatchStream(draw, Sized(), elsewhere=lambda: [[40], [7]])
    assert wide.other_sizes() == [("the largest batch", [40])]
    # Another rank has one: this one gives what it has, though that is no larger.
    assert [name for name, _ in BatchStream(draw, Sized()).other_sizes(lambda _: 1.0)] == [
        "the largest batch",
        "the smallest batch",
    ]


def test_data_that_differ_from_the_start_are_kept_and_replayed_in_a_cycle():
    stream = BatchStream(changing(0), Lists(), keep_bytes=24)
    first = [stream.batch(index) for index in range(6)]
    assert not stream.reproducible
    assert first[3:] == first[:3]
    assert [stream.batch(index) for index in range(6)] == first


def test_batches_beyond_the_budget_are_compared_when_they_are_drawn_again():
    stream = BatchStream(changing(1), Lists(), keep_bytes=1)
    pinned = stream.batch(2, pin=True)
    assert stream.reproducible
    stream.batch(1)
    assert not stream.reproducible
    assert stream.batch(2) == pinned
    assert stream.batch(1) == [0]  # the kept one, in a cycle


def test_the_largest_batch_in_memory_is_known():
    class Sized(Lists):
        """Batches of as many bytes as their number says."""

        def size_in_bytes(self, stored: list[int]) -> int:
            return stored[0]

    stream = BatchStream(lambda: ([size] for size in (3, 9, 5, 9, 20)), Sized(), keep_bytes=20)
    assert stream.largest() == [3]
    stream.batch(3)
    assert stream.largest() == [9]


def test_what_the_user_or_the_model_changes_in_place_is_no_batch_of_the_stream():
    def reused() -> Iterator[list[int]]:
        buffer = [0]
        for index in itertools.count():
            buffer[0] = index
            yield buffer

    stream = BatchStream(reused, Lists())
    for index in (0, 1, 2, 0):
        batch = stream.batch(index)
        assert batch == [index]
        batch[0] = -1
    assert list(stream.kept_batches(2)) == [[0], [1]]


def test_the_iterator_of_the_data_is_closed_before_the_next_and_at_the_end():
    open_now = []

    def draw() -> Iterator[list[int]]:
        open_now.append(1)
        assert len(open_now) == 1
        try:
            yield from counting()
        finally:
            open_now.pop()

    stream = BatchStream(draw, Lists(), keep_bytes=0)
    stream.batch(3)
    stream.batch(1)
    assert open_now
    stream.close()
    assert not open_now
