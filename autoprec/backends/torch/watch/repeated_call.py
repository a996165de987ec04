"""Computes a caught call again, forward and backward, and leaves nothing of it behind.

The state around the model goes back to what it was before the call, the loss's gradient of the
outputs is given to both runs, and gradients are returned, not accumulated: hooks of parameters,
DistributedDataParallel's reducer and `.grad` see nothing. Compiled code is not used: both runs of a
comparison are eager, and differ by the dtype alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from autoprec.backends.torch.apply.float32_islands import ENTERED, own_autocast_is
from autoprec.backends.torch.apply.forward_wrappers import is_compiled
from autoprec.backends.torch.apply.process_settings import exact_products
from autoprec.backends.torch.distributed.sharding import reshard, sharded_modules
from autoprec.backends.torch.watch.caught_call import CaughtCall, outputs_in
from autoprec.backends.torch.watch.moment import Moment

NOISE = 2.0**-9
"""The noise on weights: half a digit of bfloat16."""

_NOISE_SEED = 7919

_MOST_ELEMENTS = 2**22
"""Elements of one parameter's gradient that are compared; of larger ones every n-th is."""

_GLOBAL_HOOKS = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_backward_pre_hooks,
    nn_module._global_backward_hooks,
)

_REENTRANT = "use_reentrant=True"
"""What the error says where such checkpoints are asked for the gradients of some tensors alone."""


@dataclass(frozen=True)
class Run:
    """What one run gave: outputs by index, and gradients by the names of parameters.

    Large gradients are sampled. There are none of a model whose parameters are sharded, and none
    where the outputs' own are not finite.
    """

    outputs: dict[int, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def _eagerly(root: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which parts of a model that are compiled run as Python has them."""
    parts = (each for each in root.modules() if each is not root)
    if not any(is_compiled(each) for each in parts):
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


class RepeatedCall:
    """Runs `call` again with its first `samples` samples, in 16 bits or in float32."""

    def __init__(self, root: nn.Module, call: CaughtCall, device_type: str, samples: int) -> None:
        self._root, self._call, self._device_type = root, call, device_type
        self._samples = samples
        self._args = call.cut(call.args, samples), call.cut(call.kwargs, samples)
        self._parameters = {
            name: parameter
            for name, parameter in root.named_parameters()
            if parameter.requires_grad
        }
        self._sharded, self._by_backward = bool(sharded_modules(root)), False

    def low(self) -> Run:
        """Run under the policy's autocast, as training does."""
        return self._run(autocast=True)

    def exact(self) -> Run:
        """Run in float32, products too."""
        with exact_products():
            return self._run(autocast=False)

    def noisy(self, draw: int) -> Run:
        """Run in float32 with every weight multiplied by 1 + uniform(-NOISE, NOISE)."""
        with _noise_on(self._parameters.values(), draw):
            return self.exact()

    @property
    def can_be_noisy(self) -> bool:
        """Return whether weights can be changed for a run: not those that ranks share in parts."""
        return not self._sharded

    def _run(self, *, autocast: bool) -> Run:
        try:
            return self._run_once(autocast)
        except RuntimeError as error:
            if self._by_backward or _REENTRANT not in str(error):
                raise
        self._by_backward = True
        return self._run_once(autocast)

    def _run_once(self, autocast: bool) -> Run:
        """Run forward as `autocast` says and backward without it, as a loop does.

        What the weights were cast to meanwhile is not used again, by this or by training.
        """
        kind, dtype = self._device_type, self._call.dtype
        self._call.moment.put_back()
        torch.clear_autocast_cache()
        try:
            with (
                torch.set_grad_enabled(not self._sharded),
                torch.autocast(kind, dtype, enabled=autocast),
                own_autocast_is(self._root, autocast),
                _eagerly(self._root),
            ):
                args, kwargs = self._args
                root: Any = self._root
                result = root._call_impl(*args, **kwargs)
            found = outputs_in(result)
            pairs = {
                index: (found[index], self._call.cut_gradient(index, self._samples))
                for index in self._call.gradients
            }
            back = not self._sharded and all(bool(g.isfinite().all()) for _, g in pairs.values())
            with torch.autocast(kind, dtype, enabled=False):
                gradients = self._gradients(list(pairs.values())) if back else {}
            return Run({index: output.detach() for index, (output, _) in pairs.items()}, gradients)
        finally:
            torch.clear_autocast_cache()

    def _gradients(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
        known = [(o, g.to(o.dtype)) for o, g in pairs if o.requires_grad]
        outputs, gradients = [o for o, _ in known], [g for _, g in known]
        parameters = list(self._parameters.values())
        with _without_hooks(parameters):
            found: Sequence[torch.Tensor | None]
            if self._by_backward:
                found = _by_backward(outputs, parameters, gradients)
            else:
                found = torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)
        return {
            name: _sampled(gradient)
            for name, gradient in zip(self._parameters, found, strict=True)
            if gradient is not None and gradient.layout is torch.strided
        }


@contextlib.contextmanager
def nothing_changed(root: nn.Module) -> Iterator[None]:
    """Leave the state around the model, global hooks and what looks at calls as they are."""
    now = Moment(root)
    entered = list(ENTERED)
    hooks = [(each, dict(each)) for each in _GLOBAL_HOOKS]
    ENTERED.clear()
    for each in _GLOBAL_HOOKS:
        each.clear()
    try:
        yield
    finally:
        for each, known in hooks:
            each.update(known)
        ENTERED.extend(entered)
        reshard(root)  # an optimizer updates the parts
        now.put_back()


@contextlib.contextmanager
def _noise_on(parameters: Any, draw: int) -> Iterator[None]:
    """Let parameters hold other numbers inside, in memory of their own."""
    known = list(parameters)
    before = [parameter.data for parameter in known]
    generators: dict[torch.device, torch.Generator] = {}
    try:
        for parameter in known:
            values = parameter.data
            if values.device not in generators:
                made = torch.Generator(values.device)
                generators[values.device] = made.manual_seed(_NOISE_SEED + draw)
            noise = torch.empty_like(values)
            noise.uniform_(1 - NOISE, 1 + NOISE, generator=generators[values.device])
            parameter.data = noise.mul_(values)
        yield
    finally:
        for parameter, values in zip(known, before, strict=True):
            parameter.data = values


@contextlib.contextmanager
def _without_hooks(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Take the hooks on the parameters' gradients away inside."""
    hooked: list[Any] = [each for each in parameters if each._backward_hooks]
    before = [each._backward_hooks for each in hooked]
    for each in hooked:
        each._backward_hooks = None
    try:
        yield
    finally:
        for each, hooks in zip(hooked, before, strict=True):
            each._backward_hooks = hooks


def _by_backward(
    outputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Compute gradients where reentrant checkpoints forbid to ask for chosen ones."""
    if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters):
        raise RuntimeError("reentrant checkpoints with hooks on accumulated gradients")
    before = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    try:
        torch.autograd.backward(outputs, gradients)
        return [each.grad for each in parameters]
    finally:
        for each, gradient in zip(parameters, before, strict=True):
            each.grad = gradient


def _sampled(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.detach().reshape(-1)
    every = -(-values.numel() // _MOST_ELEMENTS)
    return values[::every].clone() if every > 1 else values
