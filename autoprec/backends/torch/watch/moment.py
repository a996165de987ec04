"""What a forward pass reads and changes besides weights and inputs, at one moment.

Buffers, state that code keeps elsewhere (`held_state`), training modes and random-number
generators: copied, and put back bit by bit into the tensors they were in. `.data` leaves version
counters alone, so that a graph that waits for its backward pass stays valid.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.held_state import (
    Holder,
    Root,
    State,
    code_of,
    find_holders,
    is_of_torch,
)
from autoprec.backends.torch.apply.kept_buffers import frozen_in
from autoprec.backends.torch.apply.tensor_copies import can_be_copied
from autoprec.backends.torch.train.held_snapshot import held_generators
from autoprec.backends.torch.train.rng import TorchGenerators, put_state, state_of

_Copy = tuple[torch.Tensor, torch.Tensor]

_MOST_SET = 2**16  # elements; a model's layers have fewer channels

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class Moment:
    """The state around a model as it is when this is made."""

    def __init__(self, root: nn.Module) -> None:
        self._modes = [(module, module.training) for module in root.modules()]
        self._generators = TorchGenerators()
        self._random = self._generators.capture()
        self._own = [(each, state_of(each)) for each in held_generators(root, _roots(root))]
        self._places: list[tuple[MutableMapping[str, Any], str, torch.Tensor | None]] = []
        self._held: list[tuple[Holder, State]] = []
        self._copies: list[_Copy] = []
        for module in root.modules():
            owner: Any = {} if isinstance(module, torch.jit.ScriptModule) else module._buffers
            self._places += [(owner, name, owner[name]) for name in owner]
        self._copy(tensor for _, _, tensor in self._places)
        self._copy(kept.tensor for kept in frozen_in(root))
        self._copy(_set_by_data(root))
        weights = {id(parameter) for parameter in root.parameters()}
        for holder in find_holders(_roots(root), registered=[root]):
            state = holder.take()
            self._held.append((holder, state))
            self._copy(t for _, t in holder.tensors(state) if id(t) not in weights)

    def _copy(self, tensors: Iterator[torch.Tensor | None]) -> None:
        known = {id(tensor) for tensor, _ in self._copies}
        for each in tensors:
            if each is not None and id(each) not in known and can_be_copied(each):
                known.add(id(each))
                self._copies.append((each, each.detach().clone()))

    def put_back(self) -> None:
        """Make everything what it was."""
        with torch.no_grad():
            for tensor, copy in self._copies:
                if tensor.shape == copy.shape:
                    tensor.data.copy_(copy)
                else:
                    tensor.data = copy.clone()
        for owner, name, there in self._places:
            if owner.get(name) is not there:
                owner[name] = there
        for holder, state in self._held:
            holder.put(state, whole=True)
        for module, training in self._modes:
            module.training = training
        for generator, known in self._own:
            put_state(generator, known)
        self._generators.restore(self._random)


def _set_by_data(root: nn.Module) -> Iterator[torch.Tensor]:
    """Yield trained weights that a model's first forward pass may set, as an ActNorm's does.

    Those are small, and of people's own modules.
    """
    for module in root.modules():
        own: Any = {} if is_of_torch(type(module)) else module._parameters
        yield from (p for p in own.values() if p is not None and p.numel() <= _MOST_SET)


def _roots(root: nn.Module) -> list[Root]:
    """Name what may keep state: the model, its classes, and the hooks that people gave it."""
    hooks = [
        ("hook", hook)
        for module in root.modules()
        for kind in _HOOKS
        for hook in vars(module).get(kind, {}).values()
    ]
    return [("", root), *code_of(root), *hooks]
