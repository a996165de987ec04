"""accelerate: a profile bound to an Accelerator, before it prepares anything.

    accelerator = Accelerator()
    precision = autoprec.integrations.accelerate.bind(accelerator, "model.profile.yaml")

The loop stays as it is: `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, `save_state`. The
methods of this one Accelerator are wrapped; others in the process are as they were. Leave
`mixed_precision` out: the profile sets it. The last update of an epoch that holds fewer
micro-batches is made of their mean, not of a part of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.integrations.bound_accelerator import BoundAccelerator
from autoprec.integrations.seam import ForeignLoop
from autoprec.integrations.settings import Settings

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
    if loop.choose().applies and loop.scaler.is_enabled():
        accelerator.scaler = loop.scaler
    if loop.choose().applies or accumulates:
        BoundAccelerator(loop, accelerator, accumulates)
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
