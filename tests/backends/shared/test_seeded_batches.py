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
from autoprec.errors import TaskError

HOST = HostGenerators()


def drawn(build_data: Callable[[int], Any], *, repeat: bool = False, checked: Any = None) -> Any:
    return draw_batches(
        Task(name="task.py", build_model=lambda: None, build_data=build_data),
        8,
        generators=HOST,
        seed=partial(HOST.seed, 3),
        iterate=iter,
        check=lambda batch, place: None if checked is None else checked.append((batch, place)),
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
