"""The methods of Fabric's precision plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autoprec.errors import UsageError
from autoprec.integrations.lightning.shared import Plugin


class FabricPlugin(Plugin):
    """The methods of Fabric's plugin; its base class is one of the two packages'."""

    _module: Any = None

    def convert_module(self, module: Any) -> Any:
        """Remember the module: it is attached when it is called, placed and wrapped by then."""
        if self._module is not None and self._module is not module:
            raise UsageError(
                f"Fabric set up {type(module).__name__} after {type(self._module).__name__}, and a "
                "profile is of one model: set the others up by a Fabric of their own"
            )
        self._module = module
        return module

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Attach the profile, and open its autocast."""
        if self.loop.attached is None:
            self.loop.attach(self._module)
        with self.loop.cast():
            yield

    def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss, and let checks know it."""
        scaled = self.loop.scaler.scale(tensor)
        super().backward(scaled, model, *args, **kwargs)  # type: ignore[misc]
        self.loop.note_loss(tensor, divided=True)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale before Fabric clips; give it `error_if_nonfinite=False` under a loss scale."""
        self.loop.scaler.unscale_once_(optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step under the loss scale."""
        if self.loop.attached is not None:
            self.loop.attached.add_optimizers([optimizer])
        scaler = self.loop.scaler
        if not scaler.is_enabled():
            return optimizer.step(**kwargs)
        stepped = scaler.step(optimizer, **kwargs)
        scaler.update()
        return stepped
