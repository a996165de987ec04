"""Gradients on their way to an optimizer step: accumulated, unscaled, clipped, then applied.

An accumulation boundary is reached after `accumulation_steps` calls of `backward`, and at the last
micro-batch of a loader that is gone through by `batches`. With several
optimizers each may have its own, and the loss scale, which they share, changes only when none of
them holds gradients at the present one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from autoprec.backends.torch.apply.accumulation_checks import AccumulationCheck, UnequalBatches
from autoprec.backends.torch.apply.loss_scaler import LossScaler
from autoprec.backends.torch.apply.nonfinite_losses import NonfiniteLossCounter
from autoprec.backends.torch.distributed.gradient_sync import GradientSync
from autoprec.backends.torch.distributed.sharding import whole
from autoprec.backends.torch.dtypes import LOW_DTYPES
from autoprec.errors import AutoprecWarning, UsageError

Batch = TypeVar("Batch")

_END_OF_LOADER: Any = object()

Clip = Callable[[Sequence[torch.optim.Optimizer]], object]
"""Clips the unscaled gradients of these optimizers' parameters."""


class OptimizerSteps:
    """Backward passes, clipping and updates of one model's optimizers under one loss scaler.

    `losses` counts the losses that were not finite. The messages name the methods of `Precision`,
    through which a training loop calls these; warnings point at the caller's caller.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: LossScaler,
        *,
        accumulation_steps: int,
        sync: GradientSync,
    ) -> None:
        self.losses = NonfiniteLossCounter()
        self._model, self._optimizers, self._sync = model, tuple(optimizers), sync
        self._scaler, self._scales = scaler, scaler.is_enabled()
        self._accumulation_steps = accumulation_steps
        self._accumulation = Accumulation(accumulation_steps)
        self._accumulation_check, self._unequal = AccumulationCheck(), UnequalBatches()
        self._seen_backward = self._on_last_batch = False
        self._warned_of_float16_loss = False

    @property
    def on_boundary(self) -> bool:
        """Return whether the next `step()` updates the weights."""
        return self._accumulation.is_complete(self._optimizers)

    @property
    def next_is_mid_accumulation(self) -> bool:
        """Return whether the micro-batch about to run is not the last one before a boundary.

        Only where `backward` counts them: an AMP loop that calls the scaler itself has boundaries
        of its own.
        """
        counted = self._accumulation.largest_count(self._optimizers)
        return self._seen_backward and counted + 1 < self._accumulation_steps

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a loader's micro-batches; the last one is a boundary; see `Precision.batches`."""
        left = iter(loader)
        following = next(left, _END_OF_LOADER)
        try:
            while following is not _END_OF_LOADER:
                batch, following = following, next(left, _END_OF_LOADER)
                self._on_last_batch = following is _END_OF_LOADER
                if self._accumulation_steps > 1:
                    self.note_batch(batch)
                yield cast(Batch, batch)
        finally:
            self._on_last_batch = False

    # Backward ----------------------------------------------------------------------------------

    def note_batch(self, batch: Any, *, again: bool = False) -> None:
        """Note a micro-batch that is about to run, for its comparison with the others."""
        self._unequal.note(batch, again=again)

    def backward(
        self,
        loss: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        *,
        last: bool,
        **kwargs: Any,
    ) -> None:
        """Add the gradient of `loss` for one optimizer or all; see `Precision.backward`."""
        chosen = self._optimizers if optimizer is None else self._selected(optimizer)
        accumulates = self._accumulation_steps > 1
        if accumulates:
            counted = self._accumulation.largest_count(chosen)
            self._accumulation_check.check(chosen, counted, self._accumulation_steps)
        self.losses.check(loss, self._scaler.counts)
        if loss.dtype in LOW_DTYPES:
            loss = self._cast_up(loss)
        if accumulates:
            loss = loss / self._accumulation_steps
            self._sync.before_backward(on_boundary=self._completes_update(chosen, last=last))
        scaled = self._scaler.scale(loss) if self._scales else loss
        if len(chosen) == len(self._optimizers):
            scaled.backward(**kwargs)
        else:
            in_buckets = self._sync.keeps_gradients_in_buckets
            with gradients_preserved(self._others(chosen), copied=in_buckets):
                scaled.backward(**kwargs)
        self._seen_backward = True
        if last:
            self._accumulation.add(chosen)
        if accumulates:
            own = _parameters(chosen) if chosen else list(self._model.parameters())
            self._accumulation_check.remember(own, chosen)
            if last:
                self._unequal.count(self._scaler.counts.step_number)

    def _completes_update(self, chosen: Sequence[torch.optim.Optimizer], *, last: bool) -> bool:
        """Return whether the backward pass to come completes an update.

        Always where several optimizers update the model: gradients that FSDP2 has not reduced yet
        cannot be told apart by optimizer.
        """
        if len(self._optimizers) > 1:
            return True
        counted = self._accumulation.largest_count(chosen)
        return last and (self._on_last_batch or counted + 1 >= self._accumulation_steps)

    def _cast_up(self, loss: torch.Tensor) -> torch.Tensor:
        """Cast a 16-bit loss up; warn of a float16 one, whose gradient is the loss scale itself."""
        if loss.dtype is torch.float16 and not self._warned_of_float16_loss:
            self._warned_of_float16_loss = True
            warnings.warn(
                "the loss is float16, so that every loss scale above 2**15 overflows: compute it "
                "with precision.compute_loss(loss_fn, outputs, targets), which is float32. To "
                "silence: filter autoprec.errors.AutoprecWarning",
                AutoprecWarning,
                stacklevel=4,
            )
        return loss.float()

    def _selected(
        self, optimizer: torch.optim.Optimizer | None
    ) -> tuple[torch.optim.Optimizer, ...]:
        """Return the optimizer that was named, else all of them."""
        if optimizer is None:
            return self._optimizers
        if not any(each is optimizer for each in self._optimizers):
            raise UsageError(
                f"optimizer={type(optimizer).__name__} given, expected one of the optimizers that "
                "apply_profile(..., optimizer=...) was given"
            )
        return (optimizer,)

    def _others(self, chosen: Sequence[torch.optim.Optimizer]) -> list[nn.Parameter]:
        """List the parameters that only the other optimizers have."""
        own = {id(p) for p in _parameters(chosen)}
        return [p for p in _parameters(self._optimizers) if id(p) not in own]

    # Clipping ----------------------------------------------------------------------------------

    def clip_norm(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Sequence[nn.Parameter] | None,
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
    ) -> torch.Tensor | None:
        """Clip the total norm on the boundary; see `Precision.clip_grad_norm_`."""

        def clip(own: Sequence[torch.optim.Optimizer]) -> torch.Tensor:
            norm = nn.utils.clip_grad_norm_(
                _parameters(own) if parameters is None else parameters,
                max_norm,
                norm_type,
                error_if_nonfinite=error_if_nonfinite,
            )
            return whole(norm)

        norm: torch.Tensor | None = self._clip(clip, optimizer)
        return norm

    def clip_value(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Sequence[nn.Parameter] | None,
        clip_value: float,
    ) -> None:
        """Clip each element on the boundary; see `Precision.clip_grad_value_`."""

        def clip(own: Sequence[torch.optim.Optimizer]) -> None:
            chosen = _parameters(own) if parameters is None else parameters
            nn.utils.clip_grad_value_(chosen, clip_value)

        self._clip(clip, optimizer)

    def _clip(self, clip: Clip, optimizer: torch.optim.Optimizer | None) -> Any:
        self._check_use("clip_grad_norm_")
        chosen = self._selected(optimizer)
        if not self._accumulation.is_complete(chosen):
            self._accumulation.clip_later(optimizer, chosen, clip)
            return None
        self._unscale(chosen)
        return clip(chosen)

    def _unscale(self, chosen: Sequence[torch.optim.Optimizer]) -> None:
        if self._scales:
            for optimizer in chosen:
                self._scaler.unscale_once_(optimizer)

    def _check_use(self, method: str) -> None:
        """Raise `UsageError` where `backward` never ran, or where there is no optimizer."""
        if not self._seen_backward:
            raise UsageError(
                f"precision.{method}() was called, but precision.backward(loss) never was: call it "
                "instead of loss.backward(). In a loop of your own use precision.scaler: "
                "scaler.unscale_(optimizer), then torch's own clipping, then scaler.step(optimizer)"
            )
        if not self._optimizers:
            raise UsageError(
                f"precision.{method}() needs an optimizer: give it to "
                "apply_profile(..., optimizer=...)"
            )

    # Update ------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Step on the boundary, and at the end of the loader; see `Precision.step`."""
        if not self._seen_backward or not self._optimizers:
            self._check_use("step")
        chosen = self._optimizers if optimizer is None else self._selected(optimizer)
        if self._accumulation.is_complete(chosen):
            return self._update(chosen)
        return self.flush(optimizer) if self._on_last_batch else False

    def flush(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Step with what a partial accumulation holds; see `Precision.flush`."""
        counted = self._accumulation
        chosen = [each for each in self._selected(optimizer) if counted.count(each) > 0]
        if not chosen and counted.count(None) == 0:
            return False
        self._check_use("flush")
        partial = [each for each in chosen if not counted.is_complete((each,))]
        for each in partial:
            self._complete(each)
        counted.clip_now(partial)
        return self._update(chosen)

    def _complete(self, optimizer: torch.optim.Optimizer) -> None:
        """Make a partial accumulation's gradients the mean over its micro-batches."""
        parameters = _parameters((optimizer,))
        self._sync.complete(parameters)
        self._unscale((optimizer,))
        factor = self._accumulation_steps / self._accumulation.count(optimizer)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _update(self, chosen: Sequence[torch.optim.Optimizer]) -> bool:
        if chosen is self._optimizers and not self._scales:
            return self._update_all_unscaled()
        changed = False
        for optimizer in chosen:
            self._scaler.step(optimizer)
            changed |= self._scaler.changed_by_last_step
            optimizer.zero_grad(set_to_none=True)
        if chosen is self._optimizers:
            self._accumulation.clear()
        else:
            self._accumulation.reset(chosen)
        if chosen is self._optimizers or self._accumulation.largest_count(self._optimizers) == 0:
            self._scaler.update()
        return changed

    def _update_all_unscaled(self) -> bool:
        """Do what `_update` does where no loss scale is involved, in as few calls as can be."""
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._accumulation.clear()
        self._scaler.note_unscaled_update()
        return True

    def reset(self) -> None:
        """Forget all accumulated micro-batches, and the clips that wait for them."""
        self._accumulation.clear()


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Parameter]:
    """List the optimizers' parameters, each once."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return list({id(p): p for group in groups for p in group["params"]}.values())


@contextmanager
def gradients_preserved(parameters: Iterable[nn.Parameter], *, copied: bool) -> Iterator[None]:
    """Preserve the gradients of these parameters over a backward pass that adds to them.

    What it adds is dropped, and not left out by `inputs=`: DistributedDataParallel waits for every
    gradient, and reentrant checkpoints give none to chosen inputs. With `copied` they are kept as
    copies: they may lie in buffers that the pass writes to.
    """
    kept = [(p, p.grad) for p in parameters]
    if copied:
        kept = [(p, None if grad is None else grad.clone()) for p, grad in kept]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


class Accumulation:
    """The micro-batches and clips that wait for a step: by optimizer, or under None without one."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._counts: dict[int, int] = {}  # by id: optimizers are no keys of their own
        self._clips: dict[int, tuple[Sequence[torch.optim.Optimizer], Clip]] = {}

    def count(self, optimizer: torch.optim.Optimizer | None) -> int:
        """Count the micro-batches whose gradients wait for this optimizer's step."""
        return self._counts.get(id(optimizer), 0)

    def largest_count(self, optimizers: Sequence[torch.optim.Optimizer]) -> int:
        """Return the largest count among these optimizers."""
        return max([self._counts.get(id(each), 0) for each in optimizers or (None,)])

    def is_complete(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Return whether each of these optimizers has all its micro-batches."""
        counts = [self._counts.get(id(each), 0) for each in optimizers or (None,)]
        return min(counts) >= self._steps

    def add(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Count a micro-batch for each of these optimizers."""
        for each in optimizers or (None,):
            self._counts[id(each)] = self._counts.get(id(each), 0) + 1

    def clip_later(
        self, name: object, optimizers: Sequence[torch.optim.Optimizer], clip: Clip
    ) -> None:
        """Remember how to clip these if their accumulation ends early; the last call counts."""
        self._clips[id(name)] = (optimizers, clip)

    def clip_now(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Clip the gradients of these optimizers as `clip_later` was told."""
        for owners, clip in self._clips.values():
            own = [each for each in owners if any(each is one for one in optimizers)]
            if own:
                clip(own)

    def reset(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Forget the counts and clips of these optimizers."""
        for each in (*optimizers, None):
            self._counts.pop(id(each), None)
            self._clips.pop(id(each), None)

    def clear(self) -> None:
        """Forget all counts and clips."""
        self._counts.clear()
        self._clips.clear()
