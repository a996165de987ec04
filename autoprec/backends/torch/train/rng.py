"""Random number generators: all of them, at once, and put back afterwards.

Python's, NumPy's and torch's (the CPU's and each initialised accelerator's), and generators that
a task's code holds. NumPy is used only where the user's program has already imported it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from autoprec.backends.shared.rng_streams import (
    HostGenerators,
    generators_preserved,
    is_host_generator,
    restore_host_generator,
    seed_host_generator,
    state_of_host_generator,
)


def seed_everything(seed: int, held: Iterable[Any] = ()) -> None:
    """Seed Python's, NumPy's and torch's generators, on every device, and the `held` ones."""
    HostGenerators().seed(seed)
    torch.manual_seed(seed)
    for index, generator in enumerate(held):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed + 1 + index)
        else:
            seed_host_generator(generator, seed + 1 + index)


def is_generator(value: Any) -> bool:
    """Say whether a value is an object that random numbers are drawn from."""
    return isinstance(value, torch.Generator) or is_host_generator(value)


def state_of(generator: Any) -> Any:
    """Return the state of a generator that code holds."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return state_of_host_generator(generator)


def put_state(generator: Any, state: Any) -> None:
    """Put back the state of a generator that code holds."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        restore_host_generator(generator, state)


class TorchGenerators:
    """Every generator that a torch task may draw from; see `Generators`."""

    def __init__(self) -> None:
        self._host = HostGenerators()

    def capture(self) -> Any:
        """Return their state at this moment."""
        return self._host.capture(), torch.get_rng_state(), _accelerator_states()

    def restore(self, state: Any) -> None:
        """Go back to a captured state."""
        host, cpu, accelerators = state
        self._host.restore(host)
        torch.set_rng_state(cpu)
        for kind, states in accelerators.items():
            for index, each in enumerate(states):
                _set_state(kind, index, each)


def rng_preserved() -> AbstractContextManager[None]:
    """Restore every generator's state on exit."""
    return generators_preserved(TorchGenerators())


def generator_states(held: Iterable[Any] = ()) -> list[torch.Tensor]:
    """Return the states of torch's own generators, which tell whether anything was drawn.

    Those of the `held` generators are with them.
    """
    accelerators = _accelerator_states().values()
    own = [torch.get_rng_state(), *(each for states in accelerators for each in states)]
    return [*own, *map(_state_of, held)]


def _state_of(generator: Any) -> torch.Tensor:
    state = state_of(generator)
    if isinstance(state, torch.Tensor):
        return state
    return torch.frombuffer(bytearray(_written(state)), dtype=torch.uint8)


def _written(state: Any) -> bytes:
    """Write the state of a generator of Python's or NumPy's kind: equal states are alike."""
    if isinstance(state, dict):
        state = [*state.items()]
    if isinstance(state, list | tuple):
        return b"(" + b",".join(map(_written, state)) + b")"
    return bytes(state.tobytes()) if hasattr(state, "tobytes") else repr(state).encode()


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
