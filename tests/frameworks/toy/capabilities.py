"""What autoprec has to know of the toy framework without importing it."""

from __future__ import annotations

from autoprec.backends.protocol import Capabilities

CAPABILITIES = Capabilities(
    title="Toy",
    model="a toy.Linear",
    backend_class="ToyBackend",
    model_modules=("toy.framework",),
    sessions_interfere=False,
)
