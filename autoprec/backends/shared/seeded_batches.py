"""Draws the user's batches: seeded, from random streams of their own, again and again if asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

from autoprec.backends.protocol import Task
from autoprec.backends.shared.rng_streams import Generators, RandomStream
from autoprec.errors import TaskError

_END = object()


def draw_batches(
    task: Task,
    batch_size: int,
    *,
    generators: Generators,
    seed: Callable[[], None],
    iterate: Callable[[Any], Iterator[Any]],
    check: Callable[[Any, int], None],
    repeat: bool,
    hint: str,
) -> Generator[Any, None, None]:
    """Yield the batches of `build_data`; with `repeat` start again at their end.

    `seed` seeds all generators before `build_data`, and data are drawn from a stream of their own:
    what training consumes (dropout) does not change what the next batch is. `iterate` goes through
    the data once; data that can be gone through only once are built anew. `check` looks at a batch
    and its place since the data began. Worker processes end when the iterator is closed. Raises
    `TaskError`, with the `hint`, where there is no batch.
    """
    stream = RandomStream(generators)
    with stream.swapped():
        seed()
        data = task.build_data(batch_size)
    iterator: Any = None
    try:
        while True:
            with stream.swapped():
                iterator = iterate(data)
            count = 0
            while True:
                with stream.swapped():
                    batch = next(iterator, _END)
                if batch is _END:
                    break
                check(batch, count)
                count += 1
                yield batch
            _close(iterator)
            if count == 0:
                raise TaskError(
                    f"{task.name}: build_data({batch_size}) yielded no batches; expected at least "
                    f"one. {hint}"
                )
            if not repeat:
                return
            if hasattr(data, "__next__"):  # a generator or another iterator
                with stream.swapped():
                    data = task.build_data(batch_size)
    finally:
        _close(iterator)


def _close(iterator: Any) -> None:
    """End the worker processes or the generator behind a data iterator."""
    for name in ("_shutdown_workers", "close"):
        end = getattr(iterator, name, None)
        if callable(end):
            with contextlib.suppress(Exception):
                end()
