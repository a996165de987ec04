"""What only we hold ends with a pass; what the user's code holds as well stays usable."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from autoprec.backends.shared import held_iterators
from autoprec.backends.shared.held_iterators import go_through


def taken(data: list[Any], count: int | None = None) -> list[Any]:
    """The batches of one pass, or the first of them; the pass is closed then."""
    passing = go_through(data, iter, lambda batch: 1)
    found: list[Any] = []
    while len(found) != count:
        ended, batch = next(passing)
        if ended:
            break
        found.append(batch)
    passing.close()
    return found


def three() -> Iterator[int]:
    yield from range(3)


def test_an_iterator_that_is_the_data_is_gone_after_its_pass() -> None:
    data: list[Any] = [three()]
    assert taken(data) == [0, 1, 2]
    assert data == []
    again: list[Any] = [[0, 1]]
    assert taken(again) == taken(again) == [0, 1]


def test_a_pool_inside_a_generator_ends_with_the_pass() -> None:
    pools = []

    def drawn() -> Iterator[int]:
        with ThreadPoolExecutor(1) as pool:
            pools.append(pool)
            yield from pool.map(abs, range(3))

    assert taken([drawn()], 1) == [0]
    with pytest.raises(RuntimeError, match="shutdown"):
        pools[0].submit(abs, 1)


class OnePass:
    """Data that hand out the same iterator again and again."""

    def __init__(self) -> None:
        self.iterator = three()

    def __iter__(self) -> Iterator[int]:
        return self.iterator


def test_what_the_user_holds_goes_on_and_begins_again_at_its_end() -> None:
    held = three()
    assert taken([held], 2) == [0, 1]
    assert taken([held]) == [2]
    assert taken([held]) == taken([held]) == [0, 1, 2]

    make = functools.cache(lambda size: map(abs, range(size)))
    assert taken([make(2)], 1) == [0]
    assert taken([make(2)]) == [1]
    assert taken([make(2)]) == taken([make(2)]) == [0, 1]

    data = OnePass()
    assert taken([data], 1) == [0]
    assert taken([data]) == [1, 2]
    assert taken([data]) == [0, 1, 2]


class Resetting:
    """A loader that has one iterator, and resets it where a pass begins."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Resetting:
        self.at = 0
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at > 2:
            raise StopIteration
        return self.at

    def close(self) -> None:
        raise AssertionError("the user's own")


def test_an_iterator_that_begins_again_is_not_replayed() -> None:
    loader = Resetting()
    assert taken([loader], 1) == [1]
    assert taken([loader]) == taken([loader])


def test_what_is_kept_of_the_users_iterators_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_iterators, "_KEPT_BYTES", 2)
    held = iter(range(5))
    assert taken([held]) == [0, 1, 2, 3, 4]
    assert taken([held]) == [0, 1]
    for _ in range(9):
        each = three()
        taken([each])
    assert len(held_iterators._KEPT) <= held_iterators._KEPT_ITERATORS
