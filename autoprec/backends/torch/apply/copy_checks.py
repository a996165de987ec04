"""Says, once, that copies of a model train in float32 where the model's profile says otherwise.

A copy that is made after `apply_profile` carries the model's wrappers along, yet no loop calls
`precision.forward` for it: the clients of federated learning, the members of an ensemble, a model
that is fine-tuned further. It trains, only slower, and nothing tells. Averages of the weights and
teachers are copies, too; no optimizer steps with their parameters, so nothing is said of them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.float32_islands import Float32Outputs
from autoprec.backends.torch.apply.forward_wrappers import wrappers_on
from autoprec.backends.torch.apply.loop_checks import STEPS
from autoprec.backends.torch.apply.noticed_steps import ignore_steps, notice_steps, warn_of_loop


class CopyCheck:
    """Notices the first optimizer steps of a copy; a call of it under any autocast ends that."""

    def __init__(self, copies: CopyChecks) -> None:
        self._copies = copies
        self._model: weakref.ref[nn.Module] | None = None
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._steps = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave nothing of it in a copy, which has one of its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def note_call(self, root: nn.Module) -> None:
        """Note a call of the copy to come; only those count that gradients will flow through."""
        if not torch.is_grad_enabled():
            return
        self._model = weakref.ref(root)
        if self._copies.told or torch.is_autocast_enabled(self._copies.device_type):
            self.end()
        else:
            notice_steps(self)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of any optimizer; after the third one of the copy's, say what was seen."""
        model = None if self._model is None else self._model()
        if model is None or optimizer in self._others:
            return
        own = {id(parameter) for parameter in model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._others.add(optimizer)
            return
        self._steps += 1
        if self._steps < STEPS:
            return
        self.end()
        if not self._copies.told:
            self._copies.told = True
            policy = self._copies.policy
            warn_of_loop(
                f"a copy of a model that a profile was applied to trains in float32 and not in "
                f"{policy}: the profile holds for the model alone. Call apply_profile for the copy "
                "and its optimizer, too, and in its loop what that returns: "
                "precision.forward(inputs), precision.backward_and_step(loss)"
            )

    def end(self) -> None:
        """Look no longer."""
        model = None if self._model is None else self._model()
        for wrapper in () if model is None else wrappers_on(model):
            if isinstance(wrapper, Float32Outputs):
                wrapper.loop_check = None
        ignore_steps(self)


class CopyChecks:
    """Waits in a model's wrapper until the model is copied; shared by all copies of it."""

    def __init__(self, policy: str, device_type: str, root: nn.Module | None = None) -> None:
        self.policy, self.device_type = policy, device_type
        self.root = None if root is None else weakref.ref(root)
        self.told = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CopyChecks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return CopyChecks, (self.policy, self.device_type)

    def of_copy(self) -> CopyCheck:
        """Return what looks at one copy."""
        return CopyCheck(self)


def check_copies(root: nn.Module, policy: str, device_type: str) -> None:
    """Let each copy that is made of `root` from now on say where it trains in float32."""
    for wrapper in wrappers_on(root):
        if isinstance(wrapper, Float32Outputs):
            wrapper.copies = CopyChecks(policy, device_type, root)


def end_checks_of_copies(root: nn.Module) -> None:
    """Let copies say nothing any more: the profile is undone, or another one follows."""
    for wrapper in wrappers_on(root):
        copies = wrapper.copies if isinstance(wrapper, Float32Outputs) else None
        if copies is not None and copies.root is not None and copies.root() is root:
            copies.told = True
