"""Random number generators: all of them, at once, and put back afterwards.

Python's, NumPy's and torch's (the CPU's and each initialised accelerator's). NumPy is used only
where the user's program has already imported it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from autoprec.backends.shared.rng_streams import HostGenerators, generators_preserved


def seed_everything(seed: int, model: nn.Module | None = None) -> None:
    """Seed Python's, NumPy's and torch's generators, on every device, and those a model holds."""
    HostGenerators().seed(seed)
    torch.manual_seed(seed)
    if model is not None:
        for index, generator in enumerate(generators_in(model)):
            generator.manual_seed(seed + 1 + index)


def generators_in(model: nn.Module) -> Iterator[torch.Generator]:
    """Yield the generators that are attributes of a model's modules."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                yield value


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


def generator_states(model: nn.Module | None = None) -> list[torch.Tensor]:
    """Return the states of torch's own generators, which tell whether anything was drawn.

    Those of the generators that a model holds are with them.
    """
    accelerators = _accelerator_states().values()
    held = () if model is None else (each.get_state() for each in generators_in(model))
    return [torch.get_rng_state(), *(each for states in accelerators for each in states), *held]


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
