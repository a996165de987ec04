"""Watches a training: when a call is caught and checked, and what follows from what is found.

A check is made where an optimizer is about to step, after the backward pass, at the weights that
the caught call had; or where the loss scaler skips that step. Nothing of a training is changed by a
check, and an update without one costs two calls that return at once.

Ranks that share the model check together, or none does, and do the same about what any of them
finds.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoprec.backends.shared.watching import CheckLog
from autoprec.backends.torch.apply.forward_wrappers import is_compiled
from autoprec.backends.torch.apply.loss_scaler import LossScaler
from autoprec.backends.torch.apply.model_changes import unwrap
from autoprec.backends.torch.distributed.gradient_sync import find_ddps, is_sharded_by_fsdp1
from autoprec.backends.torch.distributed.sharding import sharded_modules
from autoprec.backends.torch.dtypes import autocast_dtype
from autoprec.backends.torch.watch.caught_call import CallCatcher, CaughtCall
from autoprec.backends.torch.watch.check import Check
from autoprec.backends.torch.watch.differences import lost_modules
from autoprec.backends.torch.watch.live_islands import islands_of, set_islands, whole_model
from autoprec.backends.torch.watch.repeated_call import nothing_changed
from autoprec.core.numerics.watching import WAITED_FOR, WatchedStep
from autoprec.core.recipe import Recipe
from autoprec.core.watch_settings import Action

_TRIES = 8
"""Updates that are waited for a call with gradients before a check is left out."""

_SKIPS = 3
"""After so many skipped updates, each soon after the one before, the next one is looked at."""


class Watch:
    """Checks the training of `model`, and acts on what fails.

    `is_checking` while the model is called for a check and not by the loop. There is a `catcher`
    while a call is to be caught, or has been and waits for its update.
    `root` is the module at which the recipe's paths start, where that is a part of the model.
    `owner` is that of its wrappers. It holds neither the model nor its optimizers.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: LossScaler,
        *,
        root: nn.Module | None = None,
        device_type: str,
        owner: str,
        action: Action,
        every: int,
    ) -> None:
        root = unwrap(model) if root is None else root
        self._called, self._root = weakref.ref(_called(model, root)), weakref.ref(root)
        self._scaler = weakref.ref(scaler)
        self._recipe, self._device_type, self._owner = recipe, device_type, owner
        self._log = CheckLog(recipe.policy, action, every)
        self._groups = _groups(model)
        self.updates = self._tries = self._skips = self._skipped_at = 0
        self._for_skip = False
        self.is_checking = False
        self.catcher: CallCatcher | None = None
        self._handles: list[Any] = []
        self.add_optimizers(optimizers)
        scaler.on_skip = self._on_skip
        self._arm()

    def add_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Look at the steps of optimizers as well; those of the first one are counted."""
        for each in optimizers:
            if not self._handles:
                self._handles.append(each.register_step_post_hook(self._after_update))
            self._handles.append(each.register_step_pre_hook(self._before_update))

    def end(self) -> None:
        """Watch no longer; what is kept in float32 because of a check stays so."""
        self._disarm()
        for handle in self._handles:
            handle.remove()
        scaler = self._scaler()
        if scaler is not None and scaler.on_skip == self._on_skip:
            scaler.on_skip = None

    # When --------------------------------------------------------------------------------------

    def note_loss(self, loss: torch.Tensor) -> None:
        """Note the loss whose backward pass was just made."""
        catcher = self.catcher
        if catcher is not None and catcher.call is not None and catcher.call.gradients:
            catcher.call.note_loss(loss)
            self._log.note_loss(float(loss.detach().abs().max()))

    def _before_update(self, *_: Any) -> None:
        if self.catcher is not None and not self._for_skip:
            self._check_if_caught(self.catcher)

    def _after_update(self, *_: Any) -> None:
        self.updates += 1
        if self._for_skip:
            self._wait_for_skip()
        if self.catcher is None and self.updates + 1 >= self._log.due:
            self._arm()

    def _wait_for_skip(self) -> None:
        """Catch the next call in place of this one, until no skip came or a check is due."""
        if self.catcher is not None:
            self.catcher.drop()
        if self.updates >= min(self._skipped_at + WAITED_FOR, self._log.due - 1):
            self._disarm()

    def _on_skip(self) -> None:
        """Check an update that is skipped if its call was caught; catch the next one after some.

        They need not follow one another: a batch that overflows may come now and then.
        """
        near = self.updates <= self._skipped_at + WAITED_FOR
        self._skips = self._skips + 1 if near else 1
        self._skipped_at = self.updates
        if self.catcher is not None:
            self._skips = 0
            self._check_if_caught(self.catcher)
        elif self._skips >= _SKIPS:
            self._arm(for_skip=True)

    def _arm(self, *, for_skip: bool = False) -> None:
        called, root = self._called(), self._root()
        if called is not None and root is not None:
            self._tries, self._for_skip = 0, for_skip
            least = self._log.least_size(self.updates + 1)
            self.catcher = CallCatcher(called, root, self._device_type, least)

    def _disarm(self) -> None:
        if self.catcher is not None:
            self.catcher.remove()
            self.catcher, self._for_skip = None, False

    def _check_if_caught(self, catcher: CallCatcher) -> None:
        root = self._root()
        if root is None:
            return
        ready, too_small = zip(
            *self._of_all_ranks((catcher.has_all, catcher.too_small)), strict=True
        )
        if all(ready) and catcher.call is not None:
            self._disarm()
            self._check(root, catcher.call)
            return
        if any(too_small):
            for_skip = self._for_skip
            self._disarm()
            self._arm(for_skip=for_skip)
            return
        self._tries += 1
        catcher.drop()
        if self._tries >= _TRIES:
            why = catcher.failed or (
                "no call of the model as a whole, under the profile's autocast, was followed by a "
                "backward pass"
            )
            self._disarm()
            self._log.leave_out(self.updates + 1, why)

    def _of_all_ranks(self, value: Any) -> list[Any]:
        """Return every rank's value; this process's alone where no others share the model."""
        for group in self._groups:
            found = [value] * dist.get_world_size(group)
            dist.all_gather_object(found, value, group=group)
            return found
        return [value]

    # What --------------------------------------------------------------------------------------

    def _check(self, root: nn.Module, call: CaughtCall) -> None:
        scaler = self._scaler()
        scale = float(scaler.get_scale()) if scaler is not None else 1.0
        have = islands_of(root)
        modules: tuple[str, ...] = ()
        lost = sorted({path for each in self._of_all_ranks(lost_modules(root)) for path in each})
        self.is_checking = True
        with nothing_changed(root):
            check = Check(
                root,
                call,
                policy=self._recipe.policy,
                device_type=self._device_type,
                share=scale / self._recipe.accumulation_steps,
                floor=self._log.floor,
                lost=lost,
                compiled=self._called() is not root or any(map(is_compiled, root.modules())),
            )
            step = check.made(WatchedStep(self.updates + 1, batch=call.batch))
            mine = bool(step.problem), self._log.repeats(step), check.undecided, step.is_certain
            found = self._of_all_ranks((mine, self._log.fault_expected(step)))
            flags, expected = zip(*found, strict=True)
            failed, repeats, undecided, certain = map(any, zip(*flags, strict=True))
            acts = self._log.is_acted_on(
                step,
                call.size,
                failed=failed,
                repeats=repeats,
                undecided=undecided,
                certain=certain,
                expected=min(expected),
            )
            if acts and not lost:
                modules = check.mending(
                    lambda more: self._set_islands(root, (*have, *more)),
                    lambda mends: all(self._of_all_ranks(mends)),
                )
        self.is_checking = False
        if acts:
            self._log.act(
                step,
                modules,
                lambda kept: self._set_islands(root, (*have, *kept) if kept else whole_model(root)),
                lost=bool(lost),
            )

    def _set_islands(self, root: nn.Module, paths: Sequence[str]) -> None:
        dtype = autocast_dtype(self._recipe.policy)
        assert dtype is not None
        set_islands(root, paths, owner=self._owner, device_type=self._device_type, dtype=dtype)

    # State -------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[WatchedStep]:
        """Return the checks so far."""
        return self._log.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the checks, and what is kept in float32 because of them, as plain values."""
        root = self._root()
        kept = list(islands_of(root)) if root and self._log.mended else []
        return {"updates": self.updates, "float32_modules": kept} | self._log.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a training was saved."""
        self.updates = int(state["updates"])
        self._log.load_state_dict(state, self.updates)
        if self.updates + 1 < self._log.due:
            self._disarm()
        root, kept = self._root(), state["float32_modules"]
        if kept and root is not None:
            self._log.mended = True
            self._set_islands(root, kept)


def _called(model: nn.Module, root: nn.Module) -> nn.Module:
    """Return torch.compile's wrapper around `root`, which is what is called, or `root` itself."""
    compiled = (each for each in model.modules() if "_orig_mod" in each._modules)
    return next((each for each in compiled if unwrap(each) is root), root)


def _groups(model: nn.Module) -> list[Any]:
    """Return the process group of the ranks that share a model; none where they are one."""
    found: list[Any] = [ddp.process_group for ddp in find_ddps(model)]
    if not found and sharded_modules(model):
        found = [dist.group.WORLD]
    return [group for group in found if dist.get_world_size(group) > 1][:1]


def why_unwatchable(model: nn.Module) -> str:
    """Say why a model cannot be watched; nothing if it can be."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm would wait for a rank whose memory is full"
    if is_sharded_by_fsdp1(model):
        return "modules in FullyShardedDataParallel cannot be called out of turn; use fully_shard"
    return ""
