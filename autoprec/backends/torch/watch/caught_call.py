"""Catches one call of a model that is being trained: what it was given, and its outputs' gradient.

A catcher stands where `nn.Module` looks for a compiled call. So it is outside of the model's hooks,
sees compiled models as well without a new compilation, is no part of a copy or a saved model, and
costs nothing once it is taken away. What is called keeps its arguments, results and graph; hooks on
the outputs note the gradient that the loss gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.float32_islands import own_autocast
from autoprec.backends.torch.apply.nested_tensors import map_tensors, tensors_in
from autoprec.backends.torch.dtypes import LOW_DTYPES
from autoprec.backends.torch.watch.moment import Moment

_CALL = "_compiled_call_impl"

MOST_BYTES = 2**27
"""A gradient of the outputs that is larger is kept for as many samples as this holds."""

_SAMPLED = 1024
"""Elements of each output that tell whether a repeated call does what this one did."""


class CaughtCall:
    """A call as it was. `gradients` are those of its outputs, by their index, as they arrive.

    What a device holds is copied into main memory, as the device's may be full of what training
    needs. What is in main memory is not copied unless `copies` says so: it lives on, and
    `is_written` says whether anything wrote to it since.

    `batch` is the number of samples, by the first dimension of the first tensor given; 0 where
    there is none. `samples` is how many of them the gradients are known for, and `size` the number
    of elements given.
    """

    def __init__(
        self, root: nn.Module, args: Any, kwargs: Any, device_type: str, *, copies: bool
    ) -> None:
        self.moment = Moment(root)
        self._copies = copies
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._devices: dict[int, torch.device] = {}
        self.args, self.kwargs = map_tensors(self._copied, args), map_tensors(self._copied, kwargs)
        own = own_autocast(root)
        self.dtype = own.dtype if own else torch.get_autocast_dtype(device_type)
        self.gradients: dict[int, torch.Tensor] = {}
        self.sampled: dict[int, torch.Tensor] = {}
        self.loss: torch.Tensor | None = None
        given = [t for t in tensors_in([self.args, self.kwargs]) if t.dim() > 0 and not t.is_nested]
        self.batch = self.samples = int(given[0].shape[0]) if given else 0
        self.size = _size(args, kwargs)

    def follow(self, result: Any) -> None:
        """Note the outputs' values in part, and their gradients when the backward pass comes."""
        for index, tensor in enumerate(outputs_in(result)):
            if tensor.requires_grad:
                self.sampled[index] = tensor.detach().reshape(-1)[:_SAMPLED].clone()
                hooked: Any = tensor
                hooked.register_hook(_Noted(self, index))

    def note_loss(self, loss: torch.Tensor) -> None:
        """Keep the loss that the gradients are of: the first one that is noted."""
        if self.loss is None and loss.numel() == 1:
            self.loss = loss.detach()

    def note(self, index: int, gradient: torch.Tensor) -> None:
        """Keep the gradient of an output; of a large one for some samples."""
        gradient = gradient.detach()
        size = gradient.numel() * gradient.element_size()
        if size > MOST_BYTES and self._is_by_sample(gradient):
            self.samples = min(self.samples, max(1, self.batch * MOST_BYTES // size))
            gradient = gradient[: self.samples].clone()
        self.gradients[index] = gradient

    def _is_by_sample(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] == self.batch > 1

    @property
    def can_be_cut(self) -> bool:
        """Return whether fewer samples can be computed: every gradient but a scalar's has them."""
        whole = [g for g in self.gradients.values() if g.numel() > 1]
        return self.batch > 1 and all(g.dim() > 0 and g.shape[0] >= self.samples for g in whole)

    def cut(self, value: Any, samples: int) -> Any:
        """Copy arguments' first `samples` samples to the devices they came from.

        Each run has copies of its own, as a model may write to what it is given.
        """

        def back(copy: torch.Tensor) -> torch.Tensor:
            cut = samples < self.batch and self._is_by_sample(copy)
            part = copy.detach()[:samples] if cut else copy.detach()
            own = part.to(self._devices[id(copy)], copy=True)
            return own.requires_grad_(copy.requires_grad)

        return map_tensors(back, value)

    @property
    def is_written(self) -> bool:
        """Return whether the loop or the model wrote to what was given and not copied."""
        return any(tensor._version != version for tensor, version in self._versions)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy what was given, or hold it: a copy may take what training needs."""
        there = tensor.device.type == "cpu" and not self._copies and not tensor.is_inference()
        copy = tensor.detach() if there else tensor.detach().to("cpu", copy=True)
        if there:
            self._versions.append((copy, copy._version))
        self._devices[id(copy)] = tensor.device
        return copy.requires_grad_(tensor.requires_grad)

    def cut_gradient(self, index: int, samples: int) -> torch.Tensor:
        """Return the gradient of an output for its first `samples` samples."""
        gradient = self.gradients[index]
        return gradient if gradient.dim() == 0 or samples == self.batch else gradient[:samples]


def outputs_in(result: Any) -> list[torch.Tensor]:
    """List the tensors of real numbers in what a model returned."""
    found = {id(t): t for t in tensors_in(result) if t.is_floating_point() and not t.is_nested}
    return list(found.values())


def _size(args: Any, kwargs: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in([args, kwargs]))


class _Noted:
    """A hook on an output, which forgets the call when it has done its work."""

    def __init__(self, call: CaughtCall, index: int) -> None:
        self._call: CaughtCall | None = call
        self._index = index

    def __call__(self, gradient: torch.Tensor) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.note(self._index, gradient)


class CallCatcher:
    """Stands in for the call of `owner`, which is `root` or what torch.compile made of it.

    The last call under autocast that gradients flow through, with at least so many elements as
    `least` says, is caught, unless the gradient of an earlier one has arrived. `failed` says why
    nothing could be, and `too_small` that a call was passed over for its size.
    """

    def __init__(self, owner: nn.Module, root: nn.Module, device_type: str, least: int = 0) -> None:
        self._owner, self._root, self._device_type = owner, root, device_type
        self._before: Callable[..., Any] | None = owner.__dict__.get(_CALL)
        self._inside = False
        self.call: CaughtCall | None = None
        self.failed, self._least, self.too_small = "", least, False
        self._copies = False
        owner.__dict__[_CALL] = self

    @property
    def calls_eagerly(self) -> bool:
        """Return whether the owner is not compiled; see `is_compiled`."""
        return self._before is None

    @property
    def has_all(self) -> bool:
        """Return whether a call, what it was given and gradients of its outputs are there."""
        call = self.call
        return call is not None and bool(call.gradients) and not call.is_written

    def drop(self) -> None:
        """Wait for another call; where what was given was written to, that one's is copied."""
        self._copies = self._copies or (self.call is not None and self.call.is_written)
        self.call = None

    def remove(self) -> None:
        """Take it away."""
        if self._owner.__dict__.get(_CALL) is self:
            if self._before is None:
                del self._owner.__dict__[_CALL]
            else:
                self._owner.__dict__[_CALL] = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the owner as it would be called without this."""
        inner: Any = self._before or self._owner._call_impl
        if torch.compiler.is_compiling() or self._inside or not self._is_wanted():
            return inner(*args, **kwargs)
        if self._least and _size(args, kwargs) < self._least:
            self.too_small = True
            return inner(*args, **kwargs)
        self._inside = True
        try:
            self.drop()
            call = self._caught(args, kwargs)
            result = inner(*args, **kwargs)
            if call is not None:
                call.follow(result)
                self.call = call
            return result
        finally:
            self._inside = False

    def _is_wanted(self) -> bool:
        if not torch.is_grad_enabled() or self.has_all:
            return False
        return own_autocast(self._root) is not None or (
            torch.is_autocast_enabled(self._device_type)
            and torch.get_autocast_dtype(self._device_type) in LOW_DTYPES
        )

    def _caught(self, args: Any, kwargs: Any) -> CaughtCall | None:
        try:
            return CaughtCall(self._root, args, kwargs, self._device_type, copies=self._copies)
        except Exception as error:  # whatever copying people's own objects raises
            self.failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            return None
