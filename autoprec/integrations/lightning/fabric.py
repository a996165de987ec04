"""The methods of Fabric's precision plugin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from autoprec.errors import UsageError
from autoprec.integrations.lightning.shared import Plugin, closures_of


class FabricPlugin(Plugin):
    """The methods of Fabric's plugin; its base class is one of the two packages'."""

    _module: Any = None
    _waits_for_others = False  # in an update in which an optimizer was seen for the first time

    def convert_module(self, module: Any) -> Any:
        """Remember the module: it is attached when it is called, placed and wrapped by then.

        Fabric takes torch.compile's wrapper off for this, and keeps what it was made with to make
        it anew.
        """
        if self._module is not None and self._module is not module:
            raise UsageError(
                f"Fabric set up {type(module).__name__} after {type(self._module).__name__}, and a "
                "profile is of one model: set the others up by a Fabric of their own"
            )
        self._module = module
        kept = sys._getframe(1).f_locals.get("compile_kwargs")
        if kept is not None or hasattr(module, "_orig_mod"):
            self.loop.require({"compiles": "torch.compile"})
        return module

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Attach the profile, and open its autocast: of a call, or of `fabric.autocast()`."""
        if self.loop.attached is None:
            if self._module is None:
                raise UsageError(
                    "fabric.autocast() was entered before a model was set up, and a profile's "
                    "precision is of a model: call fabric.setup(model, optimizer) first"
                )
            self.loop.attach(self._module)
        with self.loop.cast():
            yield

    def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss, which ends an update that waits for others, and let checks know it."""
        scaled = self.loop.scaler.scale(tensor)
        if self._waits_for_others and self.loop.attached is not None:
            self.loop.scaler.sharing = self.loop.attached.optimizers
        self._waits_for_others = False
        super().backward(scaled, model, *args, **kwargs)  # type: ignore[misc]
        self.loop.note_loss(tensor, divided=True)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale before Fabric clips; give it `error_if_nonfinite=False` under a loss scale."""
        self._know(optimizer)
        self.loop.scaler.unscale_once_(optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step under the loss scale."""
        self._know(optimizer)
        return self.loop.step(optimizer, **kwargs)

    def _know(self, optimizer: Any) -> None:
        """Take an optimizer, which Fabric shows first where it is used."""
        attached = self.loop.attached
        if attached is not None:
            if optimizer not in attached.optimizers:
                self.loop.require({"closures": closures_of(optimizer)})
                attached.add_optimizers([optimizer])
                if self.loop.scaler.is_enabled():
                    self._wait_for_others(attached)
        elif self.loop.choose().applies:
            raise UsageError(
                "Fabric is to step an optimizer, and the model was never called through Fabric, so "
                "that it computed in float32: call what fabric.setup(...) returned, as "
                "model(inputs). A method such as model.training_step(batch) goes past it"
            )

    def _wait_for_others(self, attached: Any) -> None:
        """Keep the scale until optimizers that were not seen yet have made their step, too.

        That they are there is known by the gradients that no other optimizer steps with.
        """
        rest = {id(parameter): parameter for parameter in self._module.parameters()}
        for group in (group for each in attached.optimizers for group in each.param_groups):
            for parameter in group["params"]:
                rest.pop(id(parameter), None)
        others: Any = SimpleNamespace(param_groups=[{"params": list(rest.values())}])
        self.loop.scaler.sharing = [*attached.optimizers, others]
        self._waits_for_others = True
