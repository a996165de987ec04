"""A loss scaler that says what it did: torch's GradScaler with a floor, a fixed mode and counts.

torch's own scaler neither reports that it skipped a step nor stops halving: a forward pass that
overflows drives its scale to zero, unnoticed. This one reads the `found_inf` that GradScaler
reads anyway, so that skips are known at a fixed scale and at the floor too, and follows the scale
on the host by the rule of `torch._amp_update_scale_`, so that counting and logging never wait for
the device.

It must not change what a training loop computes: with a dynamic scale above the floor every scale,
growth counter and weight equals GradScaler's.
"""

from __future__ import annotations

import logging
import math
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from autoprec.backends.shared.loss_scaling_counts import StepCounts
from autoprec.backends.torch.apply.kept_buffers import KeptBuffers
from autoprec.backends.torch.devices import has_float64
from autoprec.core.recipe import SMALLEST_SCALE, LossScale
from autoprec.errors import AutoprecWarning, UsageError

logger = logging.getLogger("autoprec")

_FLOAT32_MAX = float(torch.finfo(torch.float32).max)


class LossScaler(torch.amp.GradScaler):  # type: ignore[misc, unused-ignore]
    """GradScaler with a floor, a fixed mode and counts; built from a recipe's `LossScale`.

    `loss_scale=None` gives a disabled scaler: every method passes through and counts, so that one
    loop serves every policy. Optimizers that unscale in their own kernel (torch's `fused=True`
    given to the constructor) are asked whether they skipped, which waits for the device once a
    step; all others cost no synchronisation that GradScaler itself does not make.
    `changed_weights` says whether any optimizer stepped before the last `update()`,
    `changed_by_last_step` whether the last `step()` did. `buffers`, where given, are those of the
    model, which a skipped step leaves as they were; `on_skip`, where given, is called before.
    `sharing`, where given, are optimizers of one loss after each of which a trainer calls
    `update()`: the scale is theirs until all that hold gradients have stepped.
    """

    def __init__(self, device: str, loss_scale: LossScale | None) -> None:
        settings = loss_scale or LossScale()
        super().__init__(
            device,
            init_scale=settings.initial,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=settings.growth_interval,
            enabled=loss_scale is not None,
        )
        self.mode = settings.mode
        self.floor = min(settings.floor, settings.initial)
        self.counts = StepCounts()
        self.buffers: KeptBuffers | None = None
        self.on_skip: Callable[[], None] | None = None
        self.sharing: Sequence[torch.optim.Optimizer] = ()
        self._is_due = False  # an update that waits for others of them
        self._complex: dict[int, tuple[int, bool]] = {}  # by optimizer, see `_has_complex`
        self._host_scale = settings.initial
        self._host_growth = 0
        self._stepped = False
        self._skipped = False
        self.is_stepping = False  # an optimizer, just now, which others may do without this
        self._floor_warned = False
        self.changed_weights = self.changed_by_last_step = False

    def scale(self, outputs: Any) -> Any:
        """Multiply by the scale: the backward pass follows, and with it the step has begun."""
        if self._is_due:
            self._end_update(None)
        if self.buffers is not None:
            self.buffers.before_backward(outputs)
        return super().scale(outputs)

    @property
    def is_in_use(self) -> bool:
        """Return whether a loss was scaled with it, or an optimizer stepped by it."""
        used = getattr(self, "_scale", None) is not None  # a disabled one has none
        return used or self._stepped or self._skipped or self.counts.steps > 0

    @property
    def has_unscaled(self) -> bool:
        """Return whether it unscaled the gradients of an optimizer, for a step or a skip."""
        known = self._stepped or self._skipped or self.counts.steps or self.counts.skipped
        return bool(known or self._per_optimizer_states)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale `optimizer`'s gradients; on a device without float64 in float32.

        torch computes the scale's reciprocal in float64, which some devices have not. In float32 it
        is exact for a power of two, which is what a loss scale is.
        """
        if not self.is_enabled():
            return
        state, scale = self._per_optimizer_states[id(optimizer)], self._scale
        if scale is None or state["stage"] is not OptState.READY or has_float64(scale.device):
            super().unscale_(optimizer)
            return
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, scale.reciprocal(), found_inf, False
        )
        state["stage"] = OptState.UNSCALED

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale complex gradients as the pairs of real numbers they are, like all others.

        torch has no kernel for complex ones, and unscales no float16.
        """
        seen: Any = _AsReal(optimizer) if self._has_complex(optimizer) else optimizer
        try:
            found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
                seen, inv_scale, found_inf, allow_fp16
            )
        except ValueError as error:  # torch's word for it
            raise UsageError(
                "parameters are float16, whose gradients cannot be unscaled: under mixed_float16 "
                "the weights stay in float32, and the policy chooses what to compute in. Leave out "
                "model.half() and model.to(torch.float16)"
            ) from error
        return found

    def _has_complex(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether it holds complex parameters; looked up again where it holds more."""
        try:
            number = sum([len(group["params"]) for group in optimizer.param_groups])
        except AttributeError as error:
            raise _no_optimizer(optimizer) from error
        known, answer = self._complex.get(id(optimizer), (-1, False))
        if known != number:
            answer = any(
                p.is_complex() for group in optimizer.param_groups for p in group["params"]
            )
            self._complex[id(optimizer)] = number, answer
        return answer

    def unscale_once_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale `optimizer`'s gradients unless that was done since the last update."""
        if not self.is_enabled() or not _has_gradients(optimizer):
            return
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step `optimizer` unless its gradients are not finite, and remember whether it stepped.

        An optimizer none of whose parameters has a gradient is left alone; torch's scaler raises
        an AssertionError there.
        """
        self.changed_by_last_step = False
        if not self.is_enabled():
            self._note(skipped=False)
            return super().step(optimizer, *args, **kwargs)
        if not _has_gradients(optimizer):
            return None
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            raise UsageError(
                "an optimizer steps for the second time while another one holds gradients at the "
                "present loss scale, which cannot change until that one has stepped too: step it, "
                "or call its zero_grad() and precision.scaler.update()"
            )
        if (args and args[0] is not None) or kwargs.get("closure") is not None:
            raise UsageError(
                f"{type(optimizer).__name__} was given a closure under a loss scale: it would take "
                "the scaled loss and gradients for the true ones. Use mixed_bfloat16 or float32"
            )
        self.is_stepping = True
        try:
            result: float | None = super().step(optimizer, *args, **kwargs)
        finally:
            self.is_stepping = False
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            self._note(skipped=any(value.item() for value in found.values()))
        return result

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        # GradScaler's own synchronisation happens here, one .item() for each device.
        skipped = any(v.item() for v in optimizer_state["found_inf_per_device"].values())
        self._note(skipped=skipped)
        return None if skipped else optimizer.step(*args, **kwargs)

    def _note(self, *, skipped: bool) -> None:
        self.changed_by_last_step = not skipped
        self._skipped |= skipped
        self._stepped |= not skipped
        if not skipped:
            torch.clear_autocast_cache()  # of the weights as they were, where autocast goes on
        if skipped and self.on_skip is not None:
            self.on_skip()
        if skipped and self.buffers is not None:
            self.buffers.after_skip()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale once after all optimizers, and count what happened.

        A fixed scale stays as it is; a dynamic one never falls under the floor.
        """
        self._is_due = new_scale is None and any(map(self._is_to_step, self.sharing))
        if not self._is_due:
            self._end_update(new_scale)

    def _is_to_step(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._per_optimizer_states.get(id(optimizer), {})
        return known.get("stage") is not OptState.STEPPED and _has_gradients(optimizer)

    def _end_update(self, new_scale: float | torch.Tensor | None) -> None:
        self._is_due = False
        if self.is_enabled() and (self._stepped or self._skipped or new_scale is not None):
            self._update_scale(new_scale)
        if self.buffers is not None and (self._stepped or self._skipped):
            self.buffers.after_update(stepped=self._stepped)
        self.counts.steps += self._stepped
        self.counts.skipped += self._skipped
        self.changed_weights = self._stepped
        self._stepped = self._skipped = False

    def note_unscaled_update(self) -> None:
        """Count an update of all optimizers, made without `step` because this is disabled."""
        torch.clear_autocast_cache()
        self.counts.steps += 1
        self.changed_weights = self.changed_by_last_step = True
        self._stepped = self._skipped = False

    def _update_scale(self, new_scale: float | torch.Tensor | None) -> None:
        if new_scale is not None:
            super().update(new_scale)
            self._host_scale = float(new_scale)
        elif self.mode == "fixed":
            self._per_optimizer_states.clear()
            if self._skipped:
                logger.info(
                    "step %d skipped: gradients not finite at the fixed loss scale %g",
                    self.counts.step_number,
                    self._host_scale,
                )
        elif self._skipped:
            super().update()
            self._follow_drop()
        else:
            super().update()
            self._follow_growth()

    def _follow_drop(self) -> None:
        before = self._host_scale
        after = _as_float32(before * self.get_backoff_factor())
        self._host_growth = 0
        if after < self.floor:
            after = min(before, self.floor)
            self._fill(after)
            self.counts.floor_hits += 1
            self._warn_floor(after)
        self._host_scale = after
        self.counts.scale_drops += after < before
        logger.info(
            "step %d skipped: gradients not finite; loss scale %g -> %g",
            self.counts.step_number,
            before,
            after,
        )

    def _follow_growth(self) -> None:
        self._host_growth += 1
        if self._host_growth < self.get_growth_interval():
            return
        before = self._host_scale
        after = _as_float32(before * self.get_growth_factor())
        self._host_growth = 0
        if math.isfinite(after):
            self._host_scale = after
            self.counts.scale_growths += 1
            logger.info("step %d: loss scale %g -> %g", self.counts.step_number, before, after)

    def _warn_floor(self, scale: float) -> None:
        if self._floor_warned:
            return
        self._floor_warned = True
        lower = (
            "; if the loss is finite, the backward pass overflows, and a lower floor helps "
            "(loss_scale: floor in the profile)"
        )
        warnings.warn(
            f"step {self.counts.step_number}: gradients are not finite at the loss scale "
            f"{scale:g}, its floor. If the loss is not finite either, the forward pass overflows "
            "float16: keep the module that does in float32 (float32_modules in the profile) or use "
            f"mixed_bfloat16{lower if scale > SMALLEST_SCALE else ''}. To silence: "
            "warnings.filterwarnings('ignore', category=autoprec.errors.AutoprecWarning).",
            AutoprecWarning,
            stacklevel=5,
        )

    def _fill(self, scale: float) -> None:
        if self._scale is not None:
            self._scale.fill_(scale)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the model's buffers out: a copy of the scaler belongs to no model."""
        state: dict[str, Any] = super().__getstate__()
        return state | {"buffers": None, "on_skip": None, "sharing": ()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state saved by this class or by torch's GradScaler.

        An empty state, saved where no scaler was needed, leaves the recipe's scale as it is.
        """
        if not self.is_enabled() or not state_dict:
            return
        super().load_state_dict(dict(state_dict))
        self._host_scale = float(state_dict["scale"])
        self._host_growth = int(state_dict["_growth_tracker"])


class _AsReal:
    """The parameters of an optimizer; tensors of real numbers stand for the complex ones.

    Their gradients share memory with those they stand for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.param_groups = [{"params": list(map(_as_real, parameters))}]


def _as_real(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    if grad is None or not grad.is_complex():
        return parameter
    real = torch.view_as_real(grad._values() if grad.is_sparse else grad)
    stand_in = torch.empty_like(real)
    stand_in.grad = real
    return stand_in


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    try:
        for group in optimizer.param_groups:  # in every step: the first parameter answers, mostly
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return True
    except AttributeError as error:
        raise _no_optimizer(optimizer) from error
    return False


def _no_optimizer(given: Any) -> UsageError:
    return UsageError(
        f"{type(given).__name__} given, expected a torch.optim.Optimizer, whose param_groups say "
        "which gradients to unscale: derive it from that class, or use mixed_bfloat16, which needs "
        "no loss scale"
    )


def _as_float32(value: float) -> float:
    """Round to float32, the scale's own dtype; beyond its range, to infinity."""
    if value > _FLOAT32_MAX:
        return math.inf
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
