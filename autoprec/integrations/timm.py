"""timm's `train.py`, and scripts made from it: its autocast and its loss scaler under a profile.

    optimizer = create_optimizer_v2(model, ...)
    amp_autocast, loss_scaler = parts("model.profile.yaml", model, optimizer, args)

That script is one function, so two of its variables are replaced: after the optimizer is made, and
before it resumes, copies the model for an average of the weights, and wraps it. Batch and
accumulation are its arguments, which its learning rate depends on: what differs is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Unpack

from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError
from autoprec.integrations.seam import ForeignLoop
from autoprec.integrations.settings import Settings

TRAINER = "timm's train.py"


def parts(
    profile: str | Path | Profile | Recipe | None,
    model: Any,
    optimizer: Any,
    args: Any,
    **settings: Unpack[Settings],
) -> tuple[Callable[[], AbstractContextManager[Any]], ProfileScaler]:
    """Attach a profile to `model` and `optimizer`; return `amp_autocast` and `loss_scaler`.

    `args` are the script's. Raises `UsageError` where they and the profile cannot be together.
    """
    loop = ForeignLoop(TRAINER, profile, **settings)
    loop.choose(str(next(model.parameters()).device))
    flag = {"bfloat16": "bf16", "float16": "fp16"}[args.amp_dtype] if args.amp else "no"
    compiles = "--torchcompile" if args.torchcompile else ""
    loop.require({"precision": flag, "compiles": compiles})
    given = args.batch_size, args.grad_accum_steps
    if given != (loop.batch_size, loop.accumulation_steps):
        raise UsageError(
            f"{TRAINER}: --batch-size {given[0]} --grad-accum-steps {given[1]} given, and the "
            f"profile was checked with {loop.batch_size} and {loop.accumulation_steps}. Give it "
            f"--batch-size {loop.batch_size} --grad-accum-steps {loop.accumulation_steps}, which "
            "its learning rate is made for, too"
        )
    loop.attach(model, [optimizer])
    return loop.cast, ProfileScaler(loop)


class ProfileScaler:
    """What `train.py` calls in place of its own `NativeScaler`; `loop` is the profile's."""

    state_dict_key = "amp_scaler"

    def __init__(self, loop: ForeignLoop) -> None:
        self.loop = loop

    def __call__(
        self,
        loss: Any,
        optimizer: Any,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Any = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Go backward, and make an update where one is due."""
        scaler = self.loop.scaler
        scaler.scale(loss).backward(create_graph=create_graph)
        self.loop.note_loss(loss, divided=True)
        if not need_update:
            return
        if clip_grad is not None:
            scaler.unscale_once_(optimizer)
            clip = importlib.import_module("timm.utils").dispatch_clip_grad
            clip(parameters, value=clip_grad, mode=clip_mode)
        self.loop.step(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale as torch's GradScaler does, and so as `NativeScaler` loads it."""
        return self.loop.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it; one that was saved without a scale changes nothing."""
        self.loop.load_state_dict(state)
