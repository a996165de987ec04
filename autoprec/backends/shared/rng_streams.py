"""Random streams of their own: what is drawn in one does not change what is drawn in another.

Training consumes random numbers (dropout), and so does the user's data; swapped streams keep the
next batch what it would have been without the training.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Generators(Protocol):
    """All random number generators that the user's code may draw from."""

    def capture(self) -> Any:
        """Return their state at this moment."""

    def restore(self, state: Any) -> None:
        """Go back to a captured state."""


class HostGenerators:
    """Python's generator, and NumPy's where the user's program has imported it."""

    def capture(self) -> Any:
        """Return their state at this moment."""
        numpy = sys.modules.get("numpy")
        return random.getstate(), None if numpy is None else numpy.random.get_state()

    def restore(self, state: Any) -> None:
        """Go back to a captured state."""
        python, numpy = state
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)

    def seed(self, seed: int) -> None:
        """Seed both."""
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)


def is_host_generator(value: Any) -> bool:
    """Say whether a value is a generator like Python's `random.Random`, or one of NumPy's."""
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (random.Random, *kinds))


def seed_host_generator(generator: Any, seed: int) -> None:
    """Seed a generator of Python's or NumPy's kind."""
    if hasattr(generator, "bit_generator"):
        own = generator.bit_generator
        own.state = type(own)(seed).state
    else:
        generator.seed(seed % 2**32)


def state_of_host_generator(generator: Any) -> Any:
    """Return the state of a generator of Python's or NumPy's kind."""
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def restore_host_generator(generator: Any, state: Any) -> None:
    """Put back the state of a generator of Python's or NumPy's kind."""
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


class RandomStream:
    """A place in the random streams, which begins where they are now."""

    def __init__(self, generators: Generators) -> None:
        self._generators = generators
        self._state = generators.capture()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Draw from this stream inside; afterwards the outer one goes on unchanged."""
        outside = self._generators.capture()
        self._generators.restore(self._state)
        try:
            yield
        finally:
            self._state = self._generators.capture()
            self._generators.restore(outside)


@contextmanager
def generators_preserved(generators: Generators) -> Iterator[None]:
    """Restore every generator's state on exit."""
    state = generators.capture()
    try:
        yield
    finally:
        generators.restore(state)
