"""The methods of the Trainer's precision plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from autoprec.integrations.lightning.shared import Plugin, closures_of

_NATIVE_STATES = ("MixedPrecision", "native_amp_scaling_state")


class TrainerPlugin(Plugin):
    """The methods of the Trainer's plugin; its base class is one of the two packages'.

    What a profile does not ask for (a loss scale, a mean) costs an update no call: whether it does
    is an attribute.
    """

    _planned = 1  # micro-batches of an update

    def convert_module(self, module: Any) -> Any:
        """Refuse what cannot be, and set how often the Trainer accumulates."""
        trainer = module.trainer
        self.loop.choose(str(trainer.strategy.root_device))
        self.loop.require(_facts(trainer, module))
        trainer.accumulate_grad_batches = self._planned = self.loop.accumulation_steps
        return module

    def connect(self, model: Any, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Any:
        """Attach the profile: the strategy has wrapped the model, no state is loaded yet."""
        for optimizer in optimizers:
            self.loop.require({"closures": closures_of(optimizer)})
        self.loop.attach(model, optimizers, holds=True)
        return model, optimizers, schedulers

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the profile's autocast."""
        return self.loop.cast()

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        """Count a micro-batch, and scale its loss."""
        self.loop.seen += 1
        if self.loop.scales:
            tensor = self.loop.scaler.scale(tensor)
        return super().pre_backward(tensor, module)  # type: ignore[misc]

    def post_backward(self, tensor: Any, module: Any) -> Any:
        """Let checks know the loss."""
        self.loop.note_loss(tensor, divided=True, scaled=True)
        return super().post_backward(tensor, module)  # type: ignore[misc]

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Make an update: gradients, their mean, hooks and clipping, and the step."""
        result, loop = closure(), self.loop
        if result is None and not loop.seen and model.automatic_optimization:
            return None  # no micro-batch gave a loss
        if loop.scales:
            loop.scaler.unscale_once_(optimizer)
        if loop.seen < self._planned and model.automatic_optimization:
            loop.complete(optimizer)
        loop.seen = 0
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        return loop.step(optimizer, **kwargs) if loop.scales else optimizer.step(**kwargs)

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip unscaled gradients, also where manual optimization clips before it steps."""
        raw = optimizer.optimizer if hasattr(optimizer, "toggle_model") else optimizer
        if self.loop.scales:
            self.loop.scaler.unscale_once_(raw)
        super().clip_gradients(raw, *args, **kwargs)  # type: ignore[misc]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the scale as Lightning's own 16-bit plugin does, which then can load it."""
        if self.loop.scaler.is_enabled():
            checkpoint[_NATIVE_STATES[0]] = self.loop.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the scale of a checkpoint that Lightning's own 16-bit plugin made."""
        if type(self).__qualname__ not in checkpoint:
            for name in _NATIVE_STATES:
                if checkpoint.get(name):
                    self.loop.load_state_dict(checkpoint[name])


def _facts(trainer: Any, module: Any) -> dict[str, Any]:
    """Return what of a Trainer the table of refusals asks for."""
    strategies = {each.__name__ for each in type(trainer.strategy).__mro__}
    callbacks = {each.__name__ for made in trainer.callbacks for each in type(made).__mro__}
    return {
        "accumulates": trainer.accumulate_grad_batches,
        "fsdp2": "ModelParallelStrategy" in strategies,
        "accumulation_schedule": "GradientAccumulationScheduler" in callbacks,
        "finds_batch": "BatchSizeFinder" if "BatchSizeFinder" in callbacks else "",
        "manual": not module.automatic_optimization,
        "compiles": "torch.compile" if getattr(module, "_compiler_ctx", None) else "",
    }
