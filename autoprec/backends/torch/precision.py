"""The object a PyTorch training loop talks to: what `apply_profile` returns.

    for inputs, targets in loader:
        with precision.autocast():
            loss = loss_fn(model(inputs), targets)
        precision.backward(loss)             # divides by accumulation_steps, scales where needed
        precision.clip_grad_norm_(1.0)       # on the boundary; unscales first, exactly once
        if precision.step():                 # True only if the weights changed
            scheduler.step()
    precision.flush()                        # ends an epoch that stopped between boundaries

The same lines serve every policy: where no loss scale is needed, `scaler` is a disabled
GradScaler. A loop written for torch.amp keeps its own lines with `precision.scaler`.

An accumulation boundary is reached after `accumulation_steps` calls of `backward`. The model's
surgery (islands, padding, layout) is not done here but in `surgery`; this module holds no model
code and must stay cheap, because it runs in every step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from autoprec.backends.torch.losses import FiniteWatch
from autoprec.backends.torch.report import SurgeryReport
from autoprec.backends.torch.scaler import LossScaler, StepCounts
from autoprec.backends.torch.tensors import to_float32
from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import AutoprecWarning, UsageError

_AUTOCAST_DTYPES = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


class Precision:
    """Autocast, loss scaling, accumulation and clipping for one model and its optimizers."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: str,
        report: SurgeryReport | None = None,
    ) -> None:
        self.recipe = recipe
        self.report = report or SurgeryReport()
        self.optimizers = tuple(optimizers)
        self._model = model
        self._device_type = torch.device(device).type
        self._dtype = _AUTOCAST_DTYPES.get(recipe.policy.compute_dtype)
        self.scaler = LossScaler(self._device_type, _loss_scale(recipe))
        self._micro_batches = 0
        self._seen_backward = False
        self._deferred_clip: Callable[[], object] | None = None
        self._low_loss_warned = False
        self._losses = FiniteWatch()

    def __repr__(self) -> str:
        return f"Precision({self.policy}, batch {self.batch_size} x {self.accumulation_steps})"

    # What the recipe says ----------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The precision choice; `policy.compute_dtype` and `policy.variable_dtype` say more."""
        return self.recipe.policy

    @property
    def batch_size(self) -> int:
        """Samples of one micro-batch on one device: what the loader should yield."""
        return self.recipe.batch_size

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches whose gradients one optimizer step averages."""
        return self.recipe.accumulation_steps

    # Forward -----------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        """A context for the forward pass: autocast by the policy, off where that is float32.

        A model under DistributedDataParallel does not synchronise gradients in the micro-batches
        before the boundary: DDP reads that in the forward pass, so this context is enough.

        The model's outputs leave it in float32, so a loss computed inside this context is float32
        unless it holds matrix products of its own; `compute_loss` and `float32` rule that out.
        """
        cast = torch.autocast(self._device_type, self._dtype, enabled=self._dtype is not None)
        if self.accumulation_steps == 1 or not self._mid_way_next():
            return cast
        stack = contextlib.ExitStack()
        stack.enter_context(self.no_sync())
        stack.enter_context(cast)
        return stack

    def float32(self) -> AbstractContextManager[Any]:
        """A context in which autocast is off, for a loss or metric that needs full precision."""
        return torch.autocast(self._device_type, self._dtype, enabled=False)

    def compute_loss(self, loss_fn: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """Call `loss_fn(*args)` in float32: autocast off, 16-bit tensors in `args` cast up.

        The CPU's autocast leaves several losses in the compute dtype; use this where `loss_fn`
        multiplies matrices or where its inputs do not come from the model's outputs.
        """
        with self.float32():
            return loss_fn(*(to_float32(arg) for arg in args))

    def no_sync(self) -> AbstractContextManager[Any]:
        """The model's own `no_sync()` (DistributedDataParallel), or a context that does nothing."""
        own = getattr(self._model, "no_sync", None)
        return own() if callable(own) else contextlib.nullcontext()

    # Backward ----------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, last: bool = True, **kwargs: Any) -> None:
        """Add the gradient of `loss`, divided by `accumulation_steps` and scaled where needed.

        `last=False` says that another loss of the same micro-batch follows, so that it is not
        counted as one. `kwargs` (`retain_graph`, `inputs`) go to `Tensor.backward`.
        """
        self._losses.see(loss, self._step_number)
        if loss.dtype in _AUTOCAST_DTYPES.values():
            loss = self._raised(loss)
        if self.accumulation_steps > 1:
            loss = loss / self.accumulation_steps
        self.scaler.scale(loss).backward(**kwargs)  # type: ignore[no-untyped-call]
        self._seen_backward = True
        self._micro_batches += last

    def _raised(self, loss: torch.Tensor) -> torch.Tensor:
        """Cast a 16-bit loss up; warn of a float16 one, whose gradient is the loss scale itself."""
        if loss.dtype is torch.float16 and not self._low_loss_warned:
            self._low_loss_warned = True
            warnings.warn(
                "the loss is float16, so that every loss scale above 2**15 overflows: compute it "
                "with precision.compute_loss(loss_fn, outputs, targets), which is float32. To "
                "silence: filter autoprec.errors.AutoprecWarning",
                AutoprecWarning,
                stacklevel=3,
            )
        return loss.float()

    @property
    def on_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        return self._micro_batches >= self.accumulation_steps

    def _mid_way_next(self) -> bool:
        """Whether the micro-batch about to run is not the last one before a boundary."""
        return self._micro_batches + 1 < self.accumulation_steps

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        parameters: Iterable[torch.nn.Parameter] | None = None,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor | None:
        """Clip the total norm of the unscaled gradients; None between boundaries.

        `parameters` defaults to those of all optimizers. Between boundaries nothing is clipped,
        but `flush()` will clip what it steps with the same way.
        """
        chosen = None if parameters is None else list(parameters)

        def clip() -> torch.Tensor:
            return torch.nn.utils.clip_grad_norm_(
                self._parameters() if chosen is None else chosen,
                max_norm,
                norm_type,
                error_if_nonfinite=error_if_nonfinite,
            )

        norm: torch.Tensor | None = self._clip(clip)
        return norm

    def clip_grad_value_(
        self, clip_value: float, *, parameters: Iterable[torch.nn.Parameter] | None = None
    ) -> None:
        """Clip each element of the unscaled gradients to +-clip_value, on the boundary only."""
        chosen = None if parameters is None else list(parameters)

        def clip() -> None:
            torch.nn.utils.clip_grad_value_(
                self._parameters() if chosen is None else chosen, clip_value
            )

        self._clip(clip)

    def _clip(self, clip: Callable[[], Any]) -> Any:
        if not self.on_boundary:
            self._deferred_clip = clip
            return None
        self._unscale()
        return clip()

    def _unscale(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_once_(optimizer)

    def _parameters(self) -> list[torch.nn.Parameter]:
        """Every optimizer's parameters, each once."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return list({id(p): p for group in groups for p in group["params"]}.values())

    # Update ------------------------------------------------------------------------------------

    def step(self) -> bool:
        """On the boundary: step every optimizer, update the scale once, zero the gradients.

        True only if weights changed: False between boundaries and where every optimizer was
        skipped because its gradients were not finite.
        """
        if not self._seen_backward:
            raise UsageError(
                "precision.step() was called, but precision.backward(loss) never was: call it "
                "instead of loss.backward(), or use precision.scaler in a loop of your own"
            )
        return self._update() if self.on_boundary else False

    def flush(self) -> bool:
        """Step with what a partial accumulation holds, and say whether weights changed.

        Each micro-batch was divided by `accumulation_steps`; its gradients are multiplied by
        `accumulation_steps / seen`, so that they are the mean over the micro-batches really seen,
        and clipped as the last clip call asked. Under DistributedDataParallel they are averaged
        over the processes first. Without anything accumulated: False.
        """
        if self._micro_batches == 0:
            return False
        if not self.on_boundary:
            self._average_over_processes()
            self._unscale()
            factor = self.accumulation_steps / self._micro_batches
            for gradient in self._gradients():
                gradient.mul_(factor)
            if self._deferred_clip is not None:
                self._deferred_clip()
        return self._update()

    def _update(self) -> bool:
        if not self.optimizers:
            raise UsageError(
                "precision.step() needs an optimizer: give it to apply_profile(..., optimizer=...)"
            )
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._micro_batches = 0
        self._deferred_clip = None
        return self.scaler.changed_weights

    def _gradients(self) -> Iterator[torch.Tensor]:
        return (p.grad for p in self._parameters() if p.grad is not None)

    def _average_over_processes(self) -> None:
        """Do what DDP leaves undone under no_sync: average the gradients over the processes."""
        if not isinstance(self._model, torch.nn.parallel.DistributedDataParallel):
            return
        group = self._model.process_group
        for gradient in self._gradients():
            torch.distributed.all_reduce(gradient, group=group)
            gradient.div_(group.size())

    # Counts and state --------------------------------------------------------------------------

    @property
    def counts(self) -> StepCounts:
        """Steps, skips and scale changes so far, as numbers."""
        return self.scaler.counts

    @property
    def steps(self) -> int:
        """Optimizer steps that changed weights."""
        return self.counts.steps

    @property
    def skipped(self) -> int:
        """Optimizer steps thrown away because gradients were not finite."""
        return self.counts.skipped

    @property
    def scale_changes(self) -> int:
        """How often the loss scale was halved or doubled."""
        return self.counts.scale_drops + self.counts.scale_growths

    @property
    def nonfinite_losses(self) -> int:
        """Losses given to `backward` that were inf or NaN; waits for an accelerator."""
        return self._losses.count(self._step_number)

    @property
    def _step_number(self) -> int:
        return self.steps + self.skipped

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, its growth counter and the counts, as plain values.

        Save it on a boundary: gradients accumulated so far are not part of it.
        """
        return {
            "scaler": self.scaler.state_dict(),
            "counts": dataclasses.asdict(self.counts) | {"nonfinite_losses": self.nonfinite_losses},
        }

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
        self._losses = FiniteWatch(int(counts.pop("nonfinite_losses", 0)))
        known = {field.name for field in dataclasses.fields(StepCounts)}
        self.scaler.counts = StepCounts(**{k: int(v) for k, v in counts.items() if k in known})
        self._micro_batches = 0
        self._deferred_clip = None


def _loss_scale(recipe: Recipe) -> LossScale | None:
    """The recipe's loss scale where its policy needs one; the default where it names none."""
    return (recipe.loss_scale or LossScale()) if recipe.policy.needs_loss_scale else None
