"""An Accelerator's methods under a profile, which stand in for those of one object."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autoprec.errors import AutoprecWarning
from autoprec.integrations.seam import ForeignLoop

_ACCUMULATING = ("backward", "accumulate")
_METHODS = (
    *("prepare", "prepare_model", "prepare_optimizer"),
    *("unscale_gradients", "autocast", "load_state", *_ACCUMULATING),
)


class BoundAccelerator:
    """Stands in for an Accelerator's methods; of one object, not of its class.

    Where profiles are switched off it only counts, for a script that accumulates by itself.
    """

    def __init__(self, loop: ForeignLoop, accelerator: Any, accumulates: bool) -> None:
        earlier = getattr(accelerator.backward, "__self__", None)
        if isinstance(earlier, BoundAccelerator):
            for name in earlier.own:
                delattr(accelerator, name)
        self.loop, self.accelerator, self.accumulates = loop, accelerator, accumulates
        self.splits = accumulates and loop.accumulation_steps > 1
        names = _METHODS if loop.choose().applies else _ACCUMULATING
        self.own: dict[str, Any] = {name: getattr(accelerator, name) for name in names}
        for name in names:
            setattr(accelerator, name, getattr(self, name))

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare; attach the profile to a model that goes past `prepare_model`."""
        result = self.own["prepare"](*args, **kwargs)
        for each in result if isinstance(result, tuple | list) else (result,):
            if self.loop.attached is None and hasattr(each, "named_modules"):
                _attach(self.loop, each)  # FSDP2 does without prepare_model
        return result

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model without accelerate's autocast, and attach the profile to it."""
        flagged = self.accelerator.native_amp
        self.accelerator.native_amp = False  # no second autocast in the model
        prepared = self.own["prepare_model"](model, *args, **kwargs)
        self.accelerator.native_amp = flagged
        _attach(self.loop, prepared, evaluation=kwargs.get("evaluation_mode", False))
        return prepared

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare an optimizer, and let the profile know it."""
        prepared = self.own["prepare_optimizer"](optimizer, *args, **kwargs)
        self.loop.add_optimizer(_raw(prepared))
        return prepared

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients, each once before its update."""
        chosen = self.accelerator._optimizers if optimizer is None else optimizer
        for each in chosen if isinstance(chosen, list | tuple) else [chosen]:
            self.loop.scaler.unscale_once_(_raw(each))

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Go backward; the last micro-batch of a partial update makes it a mean.

        Outside of `accumulate()` the script accumulates by itself, and divides its losses.
        """
        if self.splits:
            if not self.loop.seen:
                loss = loss * self.loop.accumulation_steps
            elif self.accelerator.sync_gradients:
                loss = loss * self.loop.complete_before_backward()
        self.own["backward"](loss, **kwargs)
        self.loop.note_loss(loss, divided=not self.accumulates)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Count a micro-batch."""
        self.loop.seen += 1
        with self.own["accumulate"](*models):
            yield
        if self.accelerator.sync_gradients:
            self.loop.end_update()

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Open the profile's autocast; a handler that switches it off does."""
        handler = autocast_handler or self.accelerator.autocast_handler
        is_off = handler is not None and not handler.enabled
        with self.loop.float32() if is_off else self.loop.cast():
            yield

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load a state that was saved without a loss scale as well: the scale stays as it is."""
        scaler = self.accelerator.scaler
        try:
            self.own["load_state"](*args, **kwargs)
        except FileNotFoundError as error:
            if scaler is None or Path(str(error.filename)).name != "scaler.pt":
                raise
            self.accelerator.scaler = None
            try:
                self.own["load_state"](*args, **kwargs)
            finally:
                self.accelerator.scaler = scaler


def _attach(loop: ForeignLoop, model: Any, *, evaluation: bool = False) -> None:
    places = (getattr(model, "hf_device_map", None) or {}).values()
    loop.require({"device_map": len(set(places)) > 1})
    attached = loop.attached
    if attached is None:
        loop.attach(model, loop.waiting, casts_itself=True)
    elif all(each is not attached.root for each in model.modules()) and not evaluation:
        warnings.warn(
            f"the profile is attached to {type(attached.root).__name__}; {type(model).__name__}, "
            "prepared later, trains in float32. Prepare the model that was tuned first",
            AutoprecWarning,
            stacklevel=4,
        )


def _raw(optimizer: Any) -> Any:
    wrapped = type(optimizer).__name__ == "AcceleratedOptimizer"
    return _raw(optimizer.optimizer) if wrapped else optimizer
