"""What autoprec has to know of the simulated backend before it is used."""

from __future__ import annotations

from autoprec.backends.protocol import Capabilities
from autoprec.core.recipe import KNOBS

CAPABILITIES = Capabilities(
    title="the simulated backend",
    model="",
    backend_class="SimulatedBackend",
    model_modules=("simulated",),
    knobs=tuple(KNOBS),
    rank_engines=("ddp", "fsdp2"),
    sessions_interfere=False,
    applies_without_model=True,
)
