"""Random number generators: all of them, at once, and put back afterwards.

Python's, NumPy's and torch's (the CPU's and each initialised accelerator's). NumPy is used only
where the user's program has already imported it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on every device."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@dataclass
class RngState:
    """The state of all generators at one moment."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: list[torch.Tensor] | None

    @classmethod
    def capture(cls) -> RngState:
        """Remember the present state."""
        numpy = sys.modules.get("numpy")
        return cls(
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state_all() if _cuda_in_use() else None,
        )

    def restore(self) -> None:
        """Go back to the remembered state."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Work in this stream of random numbers; afterwards the outside one goes on unchanged."""
        outside = RngState.capture()
        self.restore()
        try:
            yield
        finally:
            inside = RngState.capture()
            outside.restore()
            self.__dict__.update(inside.__dict__)


@contextmanager
def preserved() -> Iterator[None]:
    """Put every generator back at the end to where it was at the start."""
    state = RngState.capture()
    try:
        yield
    finally:
        state.restore()


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
