"""A model's buffers as they were before a step, put back where the loss scaler skips the step.

A float16 forward pass that overflows writes infinities into running means, variances and averages
before anybody knows. Its update is skipped, but a running average stays infinite for good.

All buffers of the step go back, not only those that are no longer finite: an average and the count
it is divided by belong together, and so do a table and the flag that says it was initialised. So
`num_batches_tracked` does not count a skipped step.

Whether a step is skipped is known after its backward pass, so what was there must be copied before
its first forward pass. A copy costs a launch or two for all small buffers of one dtype, and waits
for nothing. Version counters cannot say which buffers change: batch norms and `buffer.data` do not
move them. They are only asked of large buffers (masks, tables, queues), which are copied if they
changed during an earlier step; in the first step all are.

State that is no buffer of the model (plain attributes, a loss's own buffers) is `kept_state`'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.held_state import is_of_torch, is_small
from autoprec.backends.torch.apply.kept_state import KeptState
from autoprec.backends.torch.apply.loop_variables import SpoiltVariables
from autoprec.backends.torch.apply.tensor_copies import (
    Kept,
    TensorCopies,
    put_back,
    replace_nonfinite,
)


class KeptBuffers:
    """Copies the buffers of `root` before a step, and puts them back if it is skipped.

    A step begins with the first forward pass since the last update: `before_forward` is told by
    `Precision.autocast`, and by the model where other code opens autocast. Where neither saw a
    forward pass before the loss was scaled (parts called by hand, or torch.compile around the
    model, under an autocast of the loop's own), the copies are those of the last update. What the
    loop itself did since then must not be lost, so only elements that are not finite go back.
    """

    def __init__(self, root: nn.Module, device_type: str) -> None:
        self._root, self._device_type = weakref.ref(root), device_type
        self._owners = [_buffers_of(module) for module in root.modules()]
        self._buffers, self._frozen = TensorCopies(), TensorCopies()
        self._frozen.follow(frozen_in(root))
        self._held = KeptState(root)
        self._loop = SpoiltVariables()
        #: Set by the first forward or backward pass since the last update.
        self.in_step = self._saw_forward = False
        self._updated = False
        self._save()
        _KEPT.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptBuffers:
        """Return this one; `before_called` tells the copied model from its own."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing of it in a model that is saved."""
        return type(None), ()

    def forget(self) -> None:
        """Drop the copies, and hear no more of the model's forward passes."""
        _KEPT.discard(self)
        self._owners, self._buffers, self._frozen = [], TensorCopies(), TensorCopies()
        self._held.forget()

    def note_loss(self, loss_fn: Any) -> None:
        """Look, in the first step, for what the code of a loss keeps as well."""
        self._held.note_loss(loss_fn)

    def before_backward(self, loss: Any) -> None:
        """Note that the step has begun, if no forward pass was seen."""
        self.in_step = True
        self._held.look_around()
        self._loop.note_loss(loss)

    def before_forward(self) -> None:
        """Copy the buffers if the forward pass to come is a step's first one."""
        if self.in_step or not torch.is_grad_enabled():
            return
        kept = self._buffers.kept or self._frozen.kept or self._held.keeps
        if kept or any(self._owners):
            if _is_traced():
                return
            self._save()
        self.in_step = self._saw_forward = True

    def before_called(self, model: nn.Module) -> None:
        """Do so where `model` is its own and under autocast, as it is in training."""
        if self._root() is model and torch.is_autocast_enabled(self._device_type):
            self.before_forward()

    def after_skip(self) -> None:
        """Put back what the step's forward passes changed.

        Other models may have taken part (a GAN's, each with a profile of its own). What else they
        did since their last update is not this step's, so only what is not finite goes back there.
        """
        self._loop.note_skip()
        with torch.no_grad():
            for each in list(_KEPT):
                all_of_it = each is self and self._saw_forward
                for kept in (*each._buffers.kept, *filter(_is_frozen, each._frozen.kept)):
                    (put_back if all_of_it else replace_nonfinite)(kept)
                if all_of_it and not each._updated:
                    each._drop_new_buffers()
                each._reset_materialized(all_of_it=all_of_it)
                each._held.after_skip(all_of_it=all_of_it)

    def _drop_new_buffers(self) -> None:
        """Drop what a first step registered: the next one does it anew.

        What is registered later stays, for a flag that says so may not be followed then.
        """
        known = {(id(kept.owner), kept.name) for kept in self._buffers.kept}
        for owner in self._owners:
            for name in [name for name in owner if (id(owner), name) not in known]:
                del owner[name]

    def _reset_materialized(self, *, all_of_it: bool) -> None:
        """Let lazy modules that the step gave their shapes begin their statistics anew."""
        made = {id(kept.owner) for kept in self._buffers.materialized}
        root = self._root()
        for module in root.modules() if made and root is not None else ():
            reset = getattr(module, "reset_running_stats", None)
            if id(module._buffers) not in made or reset is None:
                continue
            if all_of_it or not all(bool(each.isfinite().all()) for each in module.buffers(False)):
                reset()

    def after_update(self, *, stepped: bool) -> None:
        """End the step, skipped or not: the next forward pass belongs to another one."""
        self._buffers.after_update()
        self._frozen.after_update()
        self._held.after_update(stepped=stepped)
        if stepped:
            self._loop.note_update()
        self._updated = self._updated or stepped
        if not self._saw_forward:
            self._save()
        self.in_step = self._saw_forward = False

    def _save(self) -> None:
        self._buffers.follow_buffers(self._owners)
        self._buffers.take()
        self._frozen.take()
        self._held.save()


_KEPT: weakref.WeakSet[KeptBuffers] = weakref.WeakSet()


def _buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return where a module holds its buffers; of a scripted one, which has no dict, a copy.

    Scripted code that sets another tensor in place of a buffer is not followed.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return dict(module.named_buffers(recurse=False))
    return module._buffers


def frozen_in(root: nn.Module) -> Iterator[Kept]:
    """Yield parameters that nothing trains and that people's own code may write to: codebooks.

    Those of torch's modules, as in a backbone that is frozen, are constants; but tables of
    embeddings are codebooks, too.
    """
    for module in root.modules():
        is_constant = is_of_torch(type(module)) and not isinstance(module, nn.Embedding)
        own: Any = {} if is_constant else module._parameters
        for name, each in own.items():
            if each is not None and not each.requires_grad and is_small(each):
                yield Kept(own, name, each)


def _is_frozen(kept: Kept) -> bool:
    """Say whether nothing trains a parameter that was frozen when the profile was applied."""
    return kept.tensor is not None and not kept.tensor.requires_grad


def _is_traced() -> bool:
    """Return whether other code takes down what runs: no copy of ours may become part of that."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch.is_inference_mode_enabled()
        or torch._C._functorch.maybe_current_level() is not None
    )
