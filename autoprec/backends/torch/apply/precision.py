"""The object a PyTorch training loop talks to: what `apply_profile` returns.

The same lines serve every policy: where no loss scale is needed, `scaler` is a disabled
GradScaler. A loop written for torch.amp keeps its own lines with `precision.scaler`.

`accumulation` counts what accumulates, `model_changes` changes the model. This module runs in
every step, so it must stay cheap.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from autoprec.backends.shared.loss_scaling_counts import StepCounts
from autoprec.backends.torch.apply.accumulation import OptimizerSteps
from autoprec.backends.torch.apply.autocast_context import EMPTY, EachEntry, ProfileAutocast
from autoprec.backends.torch.apply.change_report import ChangeReport
from autoprec.backends.torch.apply.float32_results import results_to_float32
from autoprec.backends.torch.apply.loop_checks import LoopCheck
from autoprec.backends.torch.apply.loss_scaler import LossScaler
from autoprec.backends.torch.apply.model_changes import unwrap
from autoprec.backends.torch.apply.nonfinite_losses import NonfiniteLossCounter
from autoprec.backends.torch.apply.scaled_model import forget_buffers, keep_buffers
from autoprec.backends.torch.apply.second_models import SecondModels
from autoprec.backends.torch.distributed.gradient_sync import GradientSync, is_sharded_by_fsdp1
from autoprec.backends.torch.dtypes import autocast_dtype
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_batch
from autoprec.errors import UsageError

if TYPE_CHECKING:
    from autoprec.backends.torch.watch.watch import Watch

Batch = TypeVar("Batch")


class Precision:
    """Autocast, loss scaling, accumulation and clipping for one model and its optimizers."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: str,
        report: ChangeReport | None = None,
        undo: Callable[[], None] | None = None,
    ) -> None:
        self.recipe = recipe
        self.report = report or ChangeReport()
        self.optimizers = tuple(optimizers)
        self._model = model
        ranks = recipe.distributed
        self._sync = GradientSync(
            model, each_microbatch=ranks is not None and ranks.sync_each_microbatch
        )
        self._device_type = torch.device(device).type
        self._dtype = autocast_dtype(recipe.policy)
        steps = recipe.accumulation_steps
        self._accumulates = steps > 1
        if recipe.policy.needs_loss_scale and is_sharded_by_fsdp1(model):
            raise UsageError(
                "mixed_float16 under FullyShardedDataParallel: each process would see the "
                "overflows of its own part alone and skip other steps than the rest. Use "
                "fully_shard (FSDP2), or mixed_bfloat16"
            )
        self.scaler = LossScaler(self._device_type, recipe.applied_loss_scale)
        keep_buffers(self.scaler, unwrap(model), self._device_type)
        self._steps = OptimizerSteps(
            model, self.optimizers, self.scaler, accumulation_steps=steps, sync=self._sync
        )
        self._undo = undo
        self._cast = self._watching = None
        if self._dtype is not None:
            self._cast = ProfileAutocast(self._device_type, self._dtype)
            models = SecondModels(model)
            self._watching = ProfileAutocast(self._device_type, self._dtype, models)
        self.loop_check: LoopCheck | None = None  # the surgeon's, over the first steps
        self.watch: Watch | None = None  # the surgeon's, over the whole training
        self._named: set[str] = set()  # classes in `compute_loss` that a warning has named

    def __repr__(self) -> str:
        batch = describe_batch(self.batch_size, self.accumulation_steps)
        return f"Precision({self.policy}, {batch})"

    # What the recipe says ----------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Return the recipe's policy, with its `compute_dtype` and `variable_dtype`."""
        return self.recipe.policy

    @property
    def batch_size(self) -> int:
        """Return the samples of one micro-batch on one device: what the loader should yield."""
        return self.recipe.batch_size

    @property
    def accumulation_steps(self) -> int:
        """Return the number of micro-batches whose gradients one optimizer step averages."""
        return self.recipe.accumulation_steps

    def updates_in(self, micro_batches: int) -> int:
        """Return how often the weights are updated in an epoch of `micro_batches`.

        `epochs * precision.updates_in(len(loader))` is what a scheduler that counts steps wants.
        """
        return -(-micro_batches // self.accumulation_steps)

    # Forward -----------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a loader's micro-batches; the last one completes an update, however many it holds.

        So `step()` returns True for the last one, too, and there is nothing left to `flush()`.
        """
        return self._steps.batches(loader)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the forward pass's context: autocast by the policy, off where that is float32.

        A model under DistributedDataParallel does not synchronise gradients in the micro-batches
        before the boundary: DDP reads that in the forward pass, so this context is enough. FSDP2
        reads it in the backward pass, and `backward` tells it.

        The model's outputs leave it in float32; compute the loss from them after this context, as
        the tuning does with `loss_fn`. Inside it a loss's own matrix products would be 16-bit, and
        CUDA's and XPU's autocast refuse `BCELoss`. A loss that must stay inside: `compute_loss`.
        """
        if not self._accumulates or torch.compiler.is_compiling():
            return self._under(self._watching)
        return EachEntry(lambda: self._under(self._watching))

    @property
    def amp(self) -> tuple[Callable[[], AbstractContextManager[Any]], LossScaler]:
        """Return `autocast` and `scaler`: all that a loop written for torch.amp needs."""
        return self.autocast, self.scaler

    def _under(self, cast: ProfileAutocast | None) -> AbstractContextManager[Any]:
        """Return `cast`; between boundaries gradients stay unsynchronised."""
        if not (self._accumulates and self._steps.next_is_mid_accumulation):
            return self._opened(cast)
        stack = contextlib.ExitStack()
        stack.enter_context(self._sync.forward_between_boundaries())
        stack.enter_context(self._opened(cast))
        return stack

    def _opened(self, cast: ProfileAutocast | None) -> AbstractContextManager[Any]:
        """Return `cast`, which a forward pass follows; torch's own where torch.compile reads it."""
        if self.loop_check is not None:
            self.loop_check.note_cast()
        if cast is None:
            if not torch.is_autocast_enabled(self._device_type):
                return EMPTY
            return self.float32()
        if torch.compiler.is_compiling():
            return torch.autocast(self._device_type, self._dtype)
        kept = self.scaler.buffers
        if kept is not None and not kept.in_step:
            kept.before_forward()
        return cast

    def cast(self) -> AbstractContextManager[Any]:
        """Return autocast by the policy alone, which leaves synchronising gradients as it is.

        In float32 outside of any autocast it is an empty context.
        """
        return self._opened(self._cast)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model under `autocast()`; its outputs are float32."""
        if self._accumulates:
            self._steps.note_batch((args, kwargs), again=True)
        with self._under(self._cast):
            return self._model(*args, **kwargs)

    def float32(self) -> AbstractContextManager[Any]:
        """Return a context without autocast, for a loss or metric that needs full precision."""
        return torch.autocast(self._device_type, self._dtype, enabled=False)

    def compute_loss(self, loss_fn: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """Call `loss_fn(*args)` in float32: autocast off, 16-bit tensors in `args` cast up.

        For a loss inside autocast, and for one of what a part of the model gave when it was called
        alone: that is 16-bit, for only the whole model's outputs are cast up.
        """
        if self.scaler.buffers is not None:
            self.scaler.buffers.note_loss(loss_fn)
        with self.float32():
            return loss_fn(*(results_to_float32(arg, self._named) for arg in args))

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients are not reduced over the ranks.

        DistributedDataParallel has a `no_sync()` of its own, for the forward pass; under FSDP2 the
        backward pass must be inside, too. For a model that no ranks share it is empty.
        """
        return self._sync.no_sync()

    # Backward ----------------------------------------------------------------------------------

    def backward(
        self,
        loss: torch.Tensor,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        last: bool = True,
        **kwargs: Any,
    ) -> None:
        """Add the gradient of `loss`, divided by `accumulation_steps` and scaled where needed.

        With an `optimizer` it is added to that one's parameters only, and counts for it alone: a
        GAN's generator loss leaves the discriminator's gradients as they are.
        `last=False` says that another loss of the same micro-batch follows, so that it is not
        counted as one. `kwargs` (`retain_graph`, `inputs`) go to `Tensor.backward`.
        Raises `UsageError` where the gradients of micro-batches that wait for their update were
        cleared meanwhile.
        """
        if self.loop_check is not None:
            self.loop_check.note_backward()
            self.loop_check = None if self.loop_check.is_over else self.loop_check
        self._steps.backward(loss, optimizer, last=last, **kwargs)
        if self.watch is not None:
            self.watch.note_loss(loss)

    @property
    def on_boundary(self) -> bool:
        """Return whether the next `step()` updates the weights."""
        return self._steps.on_boundary

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        parameters: Iterable[torch.nn.Parameter] | None = None,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor | None:
        """Clip the total norm of the unscaled gradients; None between boundaries.

        `parameters` defaults to those of all optimizers, or of the one that is named. Between
        boundaries nothing is clipped, but `flush()` will clip what it steps with the same way.
        """
        if self._is_sharded_by_fsdp1:
            raise UsageError(
                "precision.clip_grad_norm_ sees this process's part of the gradients only: under "
                "FullyShardedDataParallel call model.clip_grad_norm_, or use fully_shard (FSDP2)"
            )
        return self._steps.clip_norm(
            optimizer,
            None if parameters is None else list(parameters),
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    @cached_property  # it goes through all modules, which takes longer than all else here
    def _is_sharded_by_fsdp1(self) -> bool:
        return is_sharded_by_fsdp1(self._model)

    def clip_grad_value_(
        self,
        clip_value: float,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        parameters: Iterable[torch.nn.Parameter] | None = None,
    ) -> None:
        """Clip each element of the unscaled gradients to +-clip_value, on the boundary only."""
        chosen = None if parameters is None else list(parameters)
        self._steps.clip_value(optimizer, chosen, clip_value)

    # Update ------------------------------------------------------------------------------------

    def backward_and_step(self, loss: torch.Tensor, *, max_norm: float | None = None) -> bool:
        """Call `backward`, `clip_grad_norm_` where `max_norm` is given, and `step`.

        Returns whether the weights changed. For a loop with nothing of its own between the three.
        """
        self.backward(loss)
        if max_norm is not None:
            self.clip_grad_norm_(max_norm)
        return self.step()

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Step the optimizers, update the scale once and zero the gradients, on the boundary.

        The last micro-batch that `batches` yields is a boundary, too, as `flush()` makes one. With
        an `optimizer` that one alone is stepped and its gradients zeroed; the scale is updated
        when no other one holds gradients at the present scale. True only if weights changed: False
        between boundaries and where every optimizer was skipped because its gradients were not
        finite.
        """
        return self._steps.step(optimizer)

    def flush(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Step with what a partial accumulation holds, and say whether weights changed.

        Each micro-batch was divided by `accumulation_steps`; its gradients are multiplied by
        `accumulation_steps / seen`, so that they are the mean over the micro-batches really seen,
        and clipped as the last clip call asked. What ranks have not reduced yet is reduced first.
        Without anything accumulated: False.
        """
        return self._steps.flush(optimizer)

    def restore(self) -> None:
        """Undo what `apply_profile` did to the model, its optimizers and the process.

        Kept memory (`keep_memory`) stays kept: no process can take that back. So does our hook in
        DistributedDataParallel, which reduces as DDP does without, and what `fully_shard` was told.
        """
        forget_buffers(self.scaler)
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Precision:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    # Counts and state --------------------------------------------------------------------------

    @property
    def counts(self) -> StepCounts:
        """Return the numbers of steps, skips and scale changes so far."""
        return self.scaler.counts

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps that changed weights."""
        return self.counts.steps

    @property
    def skipped(self) -> int:
        """Return the number of optimizer steps skipped because gradients were not finite."""
        return self.counts.skipped

    @property
    def nonfinite_losses(self) -> int:
        """Count the losses given to `backward` that were inf or NaN; wait for an accelerator."""
        return self._steps.losses.count(self.counts.step_number)

    @property
    def watched(self) -> tuple[WatchedStep, ...]:
        """Return the checks made during training so far."""
        return () if self.watch is None else tuple(self.watch.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, the counts, and the checks during training, as plain values.

        Save it on a boundary: gradients accumulated so far are not part of it.
        """
        return {
            "scaler": self.scaler.state_dict(),
            "counts": dataclasses.asdict(self.counts) | {"nonfinite_losses": self.nonfinite_losses},
        } | ({} if self.watch is None else {"watch": self.watch.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class, or one of torch.amp.GradScaler from before `apply_profile`.

        A state saved without a scaler leaves the scale as the recipe has it; one saved with a
        scaler loads where none is needed.
        """
        if "scaler" not in state:
            self.scaler.load_state_dict(state)
            return
        self.scaler.load_state_dict(state["scaler"])
        counts = dict(state.get("counts", {}))
        self._steps.losses = NonfiniteLossCounter(int(counts.pop("nonfinite_losses", 0)))
        known = {field.name for field in dataclasses.fields(StepCounts)}
        self.scaler.counts = StepCounts(**{k: int(v) for k, v in counts.items() if k in known})
        self._steps.reset()
        if self.watch is not None and "watch" in state:
            self.watch.load_state_dict(state["watch"])
