"""A recipe on a model inside a training loop that somebody else owns.

The loop's own code calls the model, runs backward passes and steps optimizers; it gets a loss
scaler, an autocast for what it wants to cast, and what makes a partial accumulation a mean. What
the recipe asks of a loop beyond that (its batch, how often it accumulates) the loop's owner sets.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoprec.backends.shared.what_ran import WhatRan
from autoprec.backends.torch.apply.accumulation_checks import UnequalBatches
from autoprec.backends.torch.apply.autocast_context import EMPTY, ProfileAutocast
from autoprec.backends.torch.apply.change_report import ChangeReport
from autoprec.backends.torch.apply.first_update import FirstUpdate
from autoprec.backends.torch.apply.forward_wrappers import is_compiled
from autoprec.backends.torch.apply.loss_scaler import LossScaler
from autoprec.backends.torch.apply.model_changes import add_optimizers
from autoprec.backends.torch.apply.nested_tensors import to_channels_last
from autoprec.backends.torch.apply.scaled_model import forget_buffers, keep_buffers
from autoprec.backends.torch.apply.second_models import SecondModels
from autoprec.backends.torch.dtypes import autocast_dtype
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning

if TYPE_CHECKING:
    from autoprec.backends.torch.watch.watch import Watch

logger = logging.getLogger("autoprec")


class AttachedRecipe:
    """What `TorchSurgeon.attach` returns.

    `report` says what was done to the model, `ran` what of it took part in the first update (None
    before that). `root` is the model at which the recipe's paths start;
    `compares_calls` where the loop's script accumulates by itself; `weighs` where the loop makes
    micro-batches that do not hold as much as each other count by what they hold.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        root: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: str,
        scaler: LossScaler,
        report: ChangeReport,
        undo: Callable[[], None],
    ) -> None:
        self.recipe, self.root, self.report, self.scaler = recipe, root, report, scaler
        self.ran: WhatRan | None = None
        self.compares_calls = self.weighs = False
        self.watch: Watch | None = None  # the surgeon's, over the whole training
        self.optimizers: list[torch.optim.Optimizer] = []
        self._device_type = torch.device(device).type
        self._dtype = autocast_dtype(recipe.policy)
        self._undo, self._scales = undo, scaler.is_enabled()
        self._cast: ProfileAutocast | None = None
        if self._dtype is not None:
            models = SecondModels(root)
            self._cast = ProfileAutocast(self._device_type, self._dtype, models)
        keep_buffers(scaler, root, self._device_type)
        islands = (*report.islands, *report.outputs)
        padded = [each.path for each in report.padded]
        compiled = any(is_compiled(each) for each in root.modules())
        self._first = FirstUpdate(root, islands=islands, padded=padded, compiled=compiled)
        self._calls: Any = None
        self._unequal = UnequalBatches() if recipe.accumulation_steps > 1 else None
        if not compiled:  # a hook that goes away would compile the model anew
            self._calls = root.register_forward_pre_hook(self._note, with_kwargs=True)
        self._handles: list[Any] = []
        self._count_steps(optimizers)

    # What the loop's owner calls ---------------------------------------------------------------

    def cast(self) -> AbstractContextManager[Any]:
        """Return autocast by the policy; an empty context in float32."""
        if self._cast is None:
            return EMPTY
        if torch.compiler.is_compiling():  # which knows torch's own context alone
            return torch.autocast(self._device_type, self._dtype)
        kept = self.scaler.buffers
        if kept is not None and not kept.in_step:
            kept.before_forward()
        return self._cast

    def float32(self) -> AbstractContextManager[Any]:
        """Return a context without autocast."""
        return torch.autocast(self._device_type, self._dtype, enabled=False)

    def inputs(self, batch: Any) -> Any:
        """Return a batch laid out as the recipe says, and note its size."""
        if self.ran is None:
            self._first.note_batch(batch)
        if self._unequal is not None:
            self._unequal.note(batch)
        return to_channels_last(batch) if self.recipe.memory_format == "channels_last" else batch

    def add_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Do to optimizers what attaching does to those that are there."""
        known = {id(each) for each in self.optimizers}
        new = [each for each in optimizers if id(each) not in known]
        if new:
            add_optimizers(self.recipe, self.root, new)
            self._count_steps(new)
            if self.watch is not None:
                self.watch.add_optimizers(new)

    def note_loss(self, loss: torch.Tensor, *, divided: bool, scaled: bool) -> None:
        """Note a micro-batch's loss whose backward pass was just made, for checks.

        `divided` says that it is already what the micro-batch adds to the update's loss.
        """
        if self._unequal is not None and not self.weighs:
            self._unequal.count(self.scaler.counts.step_number)
        if self.watch is not None and self.watch.catcher is not None:
            factor = self.recipe.accumulation_steps if divided else 1
            scale = self.scaler.get_scale() if scaled else 1.0
            self.watch.note_loss(loss.detach() * (factor / scale))

    def restore(self) -> None:
        """Undo what attaching did to the model, its optimizers and the process."""
        self._first.end()
        for handle in (*self._handles, *filter(None, [self._calls])):
            handle.remove()
        self._handles.clear()
        self.scaler.sharing = ()
        forget_buffers(self.scaler)
        self._undo()

    # The first update --------------------------------------------------------------------------

    def _count_steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
            self.optimizers.append(optimizer)
        if len(self.optimizers) > 1:
            self.scaler.sharing = self.optimizers

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.watch is not None and self.watch.is_checking:
            return
        if self.ran is None:
            self._first.note_call((args, kwargs))
        if self._unequal is not None:
            self._unequal.note((args, kwargs), again=True)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._scales and optimizer is self.optimizers[0]:
            self.scaler.note_unscaled_update()
        if self.ran is not None:
            return
        if self._calls is not None and self._unequal is None:
            self._calls.remove()
        self.ran = self._first.end(compares_calls=self.compares_calls)
        logger.info("%s", self.ran.line(self.recipe))
        left = [f"{each.path}: {each.what}: {each.reason}" for each in self.report.skipped]
        for problem in (*self.ran.problems(self.recipe), *left):
            warnings.warn(f"profile: {problem}", AutoprecWarning, stacklevel=2)


def scale_gradients(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Multiply the gradients of all parameters in `optimizers`, each once."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    for parameter in {id(p): p for group in groups for p in group["params"]}.values():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def new_scaler(recipe: Recipe, device: str) -> LossScaler:
    """Return the scaler of a recipe, before there is a model."""
    return LossScaler(torch.device(device).type, recipe.applied_loss_scale)
