"""Batches are drawn from seeded streams of their own, and again from the start where asked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from autoprec.backends.protocol import Task
from autoprec.backends.shared.rng_streams import HostGenerators
from autoprec.backends.shared.seeded_batches import draw_batches
from autoprec.errors import DataError, TaskError

HOST = HostGenerators()


def drawn(build_data: Callable[[int], Any], *, repeat: bool = False, checked: Any = None) -> Any:
    return draw_batches(
        Task(name="task.py", build_model=lambda: None, build_data=build_data),
        8,
        generators=HOST,
        seed=partial(HOST.seed, 3),
        iterate=iter,
        check=lambda batch, place: None if checked is None else checked.append((batch, place)),
        size_in_bytes=lambda batch: 1,
        repeat=repeat,
        hint="Is it large enough?",
    )


def numbers(batch_size: int) -> Any:
    return (random.random() for _ in range(3))


def test_data_are_seeded_and_what_is_drawn_meanwhile_does_not_change_them():
    alone = list(drawn(numbers))
    beside = []
    HOST.seed(0)
    for batch in drawn(numbers):
        beside.append(batch)
        random.random()
    assert beside == alone
    HOST.seed(0)
    expected = random.random()
    HOST.seed(0)
    list(drawn(numbers))
    assert random.random() == expected


@pytest.mark.parametrize("data", [[0, 1, 2], None])
def test_repeated_data_begin_again_and_a_generator_is_built_anew(data):
    built, checked = [], []

    def build(batch_size: int) -> Any:
        built.append(batch_size)
        return data or (each for each in range(3))

    assert list(itertools.islice(drawn(build, repeat=True, checked=checked), 7)) == [
        *(0, 1, 2, 0, 1, 2, 0)
    ]
    assert built == [8] * (1 if data else 3)
    assert checked == [(index % 3, index % 3) for index in range(7)]
    assert list(drawn(build)) == [0, 1, 2]


@pytest.mark.parametrize("repeat", [False, True])
def test_no_batch_at_all_is_the_users_error(repeat):
    with pytest.raises(TaskError, match=r"build_data\(8\) yielded no batches.*Is it large enough"):
        next(drawn(lambda batch_size: [], repeat=repeat))


@pytest.mark.parametrize("whole", [False, True])
def test_the_users_generator_and_workers_end_with_the_batches(whole):
    ended = []

    class Workers:
        def __init__(self) -> None:
            self._left = iter(range(2))

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            return next(self._left)

        def _shutdown_workers(self) -> None:
            ended.append("workers")

        def close(self) -> None:
            ended.append("closed")
            raise OSError("already gone")

    stream = drawn(lambda batch_size: Workers())
    next(stream)
    list(stream) if whole else stream.close()
    assert set(ended) == {"workers", "closed"}


def test_what_the_users_code_holds_is_not_ended():
    loader = Forever()
    stream = drawn(lambda batch_size: loader.iterator)
    assert next(stream) == 0
    stream.close()
    assert loader.ended == []
    assert next(drawn(lambda batch_size: loader.iterator)) == 1


class Forever:
    """A loader that keeps its iterator, which cannot be used after it was closed."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.iterator = self._count()

    def _count(self) -> Any:
        try:
            yield from itertools.count()
        finally:
            self.ended.append("closed")


def test_one_iterator_for_every_call_is_drawn_to_its_end_and_then_again():
    shared = iter(range(3))
    first, second = (drawn(lambda batch_size: shared, repeat=True) for _ in range(2))
    assert [next(first), next(second)] == [0, 1]
    assert list(itertools.islice(second, 5)) == [2, 0, 1, 2, 0]
    assert list(itertools.islice(first, 4)) == [0, 1, 2, 0]


def test_data_whose_second_pass_is_empty_are_built_anew():
    class Once:
        def __init__(self) -> None:
            self.left = [0, 1]

        def __iter__(self) -> Any:
            while self.left:
                yield self.left.pop()

    assert list(itertools.islice(drawn(lambda size: Once(), repeat=True), 5)) == [1, 0, 1, 0, 1]
    once = Once()
    stream = drawn(lambda size: once, repeat=True)
    assert [next(stream), next(stream)] == [1, 0]
    with pytest.raises(TaskError, match="batches at first and none when it was called again"):
        next(stream)
    with pytest.raises(TaskError, match="did it return an iterator that has ended"):
        next(drawn(lambda size: once))


def damaged(batch_size: int) -> Any:
    yield 0
    raise ValueError("row 7 is damaged")


def test_what_the_users_data_raise_names_them():
    def missing(batch_size: int) -> Any:
        raise FileNotFoundError

    stream = drawn(damaged)
    next(stream)
    with pytest.raises(DataError, match="what build_data returned raised ValueError: row 7") as it:
        next(stream)
    assert isinstance(it.value.__cause__, ValueError)
    line = damaged.__code__.co_firstlineno
    assert f"build_data is at line {line} of test_seeded_batches.py" in str(it.value)
    with pytest.raises(DataError, match=r"task\.py: build_data raised FileNotFoundError \("):
        next(drawn(missing))


def test_memory_that_the_data_lack_stays_an_error_of_memory():
    def large(batch_size: int) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        next(drawn(large))
