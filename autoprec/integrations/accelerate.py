"""accelerate: a profile bound to an Accelerator, before it prepares anything.

    accelerator = Accelerator()
    precision = autoprec.integrations.accelerate.bind(accelerator, "model.profile.yaml")

The loop stays as it is: `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, `save_state`. The
methods of this one Accelerator are wrapped; others in the process are as they were. Leave
`mixed_precision` out: the profile sets it. The last update of an epoch that holds fewer
micro-batches is made of their mean, not of a part of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning
from autoprec.integrations.seam import ForeignLoop
from autoprec.integrations.settings import Settings

_METHODS = (
    *("prepare", "prepare_model", "prepare_optimizer"),
    *("unscale_gradients", "backward", "accumulate"),
)
_OWN_PRECISION = {"MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}


def bind(
    accelerator: Any,
    profile: str | Path | Profile | Recipe | None,
    **settings: Unpack[Settings],
) -> ForeignLoop:
    """Let `accelerator` train under a profile; call it before `prepare`.

    The result has `batch_size` for the loader, `skipped`, `watched` and `float32()`. Raises
    `UsageError` with the way out.
    """
    loop = ForeignLoop("accelerate", profile, script_accumulates=True, **settings)
    return bind_loop(loop, accelerator)


def bind_loop(loop: ForeignLoop, accelerator: Any, *, accumulates: bool = True) -> ForeignLoop:
    """Bind a loop to an Accelerator, which divides losses itself only if it `accumulates`."""
    loop.detach()
    loop.choose(str(accelerator.device))
    loop.require(facts_of(accelerator, accumulates=accumulates))
    if accumulates:
        accelerator.gradient_accumulation_steps = loop.accumulation_steps
    if loop.choose().applies:
        if loop.scaler.is_enabled():
            accelerator.scaler = loop.scaler
        _Bound(loop, accelerator, accumulates)
    return loop


def facts_of(accelerator: Any, *, accumulates: bool = True) -> dict[str, Any]:
    """Return what of an Accelerator the table of refusals asks for."""
    kind, dynamo = accelerator.distributed_type.name, accelerator.state.dynamo_plugin
    compiles = dynamo is not None and dynamo.backend.name != "NO"
    is_fsdp2 = kind == "FSDP" and accelerator.is_fsdp2
    prepared = [("model", accelerator._models), ("optimizer", accelerator._optimizers)]
    return {
        "precision": accelerator.mixed_precision,
        "accumulates": accelerator.gradient_accumulation_steps if accumulates else 1,
        "fsdp1": kind == "FSDP" and not is_fsdp2,
        "fsdp2": is_fsdp2,
        "deepspeed": kind == "DEEPSPEED",
        "own_precision": _OWN_PRECISION.get(kind, ""),
        "compiles": "accelerate's dynamo_backend" if compiles else "",
        "regional_compile": compiles and dynamo.use_regional_compilation,
        "prepared": " and ".join(name for name, objects in prepared if objects),
    }


class _Bound:
    """Stands in for an Accelerator's methods; of one object, not of its class."""

    def __init__(self, loop: ForeignLoop, accelerator: Any, accumulates: bool) -> None:
        earlier = getattr(accelerator.prepare, "__self__", None)
        if isinstance(earlier, _Bound):
            for name in _METHODS:
                delattr(accelerator, name)
        self.loop, self.accelerator, self.accumulates = loop, accelerator, accumulates
        self.own = {name: getattr(accelerator, name) for name in _METHODS}
        for name in _METHODS:
            setattr(accelerator, name, getattr(self, name))

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        result = self.own["prepare"](*args, **kwargs)
        for each in result if isinstance(result, tuple | list) else (result,):
            if self.loop.attached is None and hasattr(each, "named_modules"):
                _attach(self.loop, each)  # FSDP2 does without prepare_model
        return result

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        flagged = self.accelerator.native_amp
        self.accelerator.native_amp = False  # no second autocast in the model
        prepared = self.own["prepare_model"](model, *args, **kwargs)
        self.accelerator.native_amp = flagged
        _attach(self.loop, prepared, evaluation=kwargs.get("evaluation_mode", False))
        return prepared

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = self.own["prepare_optimizer"](optimizer, *args, **kwargs)
        self.loop.add_optimizer(_raw(prepared))
        return prepared

    def unscale_gradients(self, optimizer: Any = None) -> None:
        chosen = self.accelerator._optimizers if optimizer is None else optimizer
        for each in chosen if isinstance(chosen, list | tuple) else [chosen]:
            self.loop.scaler.unscale_once_(_raw(each))

    def backward(self, loss: Any, **kwargs: Any) -> None:
        if self.accumulates and self.accelerator.sync_gradients:
            loss = loss * self.loop.complete_before_backward()
        self.own["backward"](loss, **kwargs)
        self.loop.note_loss(loss, divided=not self.accumulates)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        self.loop.seen += 1
        with self.own["accumulate"](*models):
            yield
        if self.accelerator.sync_gradients:
            self.loop.end_update()


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
