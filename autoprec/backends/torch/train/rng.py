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
    accelerators: dict[str, list[torch.Tensor]]

    @classmethod
    def capture(cls) -> RngState:
        """Capture the present state."""
        numpy = sys.modules.get("numpy")
        return cls(
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
            cpu=torch.get_rng_state(),
            accelerators=_accelerator_states(),
        )

    def restore(self) -> None:
        """Return to the captured state."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for kind, states in self.accelerators.items():
            for index, state in enumerate(states):
                _set_state(kind, index, state)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Draw from this state's random numbers; afterwards the outer ones continue unchanged."""
        outside = RngState.capture()
        self.restore()
        try:
            yield
        finally:
            inside = RngState.capture()
            outside.restore()
            self.__dict__.update(inside.__dict__)


@contextmanager
def rng_preserved() -> Iterator[None]:
    """Restore every generator's state on exit."""
    state = RngState.capture()
    try:
        yield
    finally:
        state.restore()


def _accelerator_states() -> dict[str, list[torch.Tensor]]:
    """Return the states of each kind of accelerator in use, one for each device."""
    states = {}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    if torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        states["xpu"] = torch.xpu.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = [torch.mps.get_rng_state()]
    return states


def _set_state(kind: str, index: int, state: torch.Tensor) -> None:
    if kind == "mps":
        torch.mps.set_rng_state(state)
    else:
        getattr(torch, kind).set_rng_state(state, index)
