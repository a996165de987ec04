"""DeepSpeed: the sections of its settings that mean what a profile does, or a refusal.

    engine, *_ = deepspeed.initialize(model=model, config=config("model.profile.yaml") | {...})

DeepSpeed owns the step: it switches other autocasts off, scales losses itself, and under ZeRO 3
leaves a module's weight empty outside of its forward. So nothing is attached to it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from autoprec.core.export import settings_of
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.integrations.chosen import ChosenProfile

_NUMERICS = ("float32_modules", "loss_scale", "tf32")


def config(profile: str | Path | Profile | Recipe | None) -> dict[str, Any]:
    """Return what `deepspeed.initialize(config=...)` takes, for this process's device.

    Micro-batch, accumulation, and autocast over float32 weights (`torch_autocast`). What of the
    profile is for speed and has no setting there is told in a warning. Raises `UsageError` for what
    decides how it trains: islands, a loss scale, TF32.
    """
    chosen = ChosenProfile("DeepSpeed", profile)
    settings, left = settings_of(chosen.recipe, "deepspeed")
    lost = [f"{name} ({left[name]})" for name in _NUMERICS if name in left]
    if lost:
        raise UsageError(
            f"DeepSpeed with this profile: it has no setting for {', '.join(lost)}, and the "
            "profile was checked with it. Tune with --policies mixed_bfloat16,float32, or train "
            "with DDP or FSDP2, which take the whole profile"
        )
    if left:
        told = ", ".join(f"{name} ({what})" for name, what in left.items())
        warnings.warn(
            f"DeepSpeed has no setting for {told}, which was part of what was timed; the training "
            "is the one that was checked. To silence: filter autoprec.errors.AutoprecWarning",
            AutoprecWarning,
            stacklevel=2,
        )
    return settings
