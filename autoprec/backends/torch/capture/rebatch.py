"""A user's loader at another batch size, from the same samples in the same order.

What a DataLoader draws is said by its batch sampler, so a copy of the loader gets another one: its
collator pads and stacks whatever it is given. Batches that a data set yields whole are joined and
cut, where every tensor has the samples first and batches are not padded one by one. Where neither
can be, the batch stays the loader's, and that is said. Generators that a loader holds are copied or
put back: what it would draw next stays what it was.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from autoprec.backends.shared.recorded_batches import RecordedBatches
from autoprec.backends.torch.capture.joined_batches import CutBatches, samples_of
from autoprec.backends.torch.train.rng import is_generator, put_state, rng_preserved, state_of
from autoprec.errors import TaskError, UsageError

_SEEN_BATCHES = 4
"""How many batches are looked at for their size and shape."""

_FUNCTION = "give the loader as a function of the batch size that returns one"


@dataclass(frozen=True)
class Batches:
    """A loader at any batch size: `build(batch_size)` returns an iterable of batches.

    `own` is the samples in a batch of the loader itself (None: not one number), `fixed` says why
    there are no others (empty: there are).
    """

    build: Callable[[int], Any]
    own: int | None = None
    fixed: str = ""


def rebatch(loader: Any, name: str) -> Batches:
    """Return a loader at any batch size, or at its own with the reason; `UsageError` for no loader.

    A function of the batch size is called as it is.
    """
    if isinstance(loader, DataLoader):
        return _of_loader(loader, name)
    if isinstance(loader, Iterator):
        return _cut(RecordedBatches(loader), name, "the iterator")
    if hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"):
        return _cut(loader, name, f"the {type(loader).__name__}")
    if callable(loader):
        return Batches(loader)
    kind = "None" if loader is None else f"a {type(loader).__name__}"
    raise UsageError(
        f"{name}: the loader is {kind}, expected a DataLoader, an iterable of batches, or a "
        "function of the batch size that returns one"
    )


def _of_loader(loader: DataLoader[Any], name: str) -> Batches:
    title = f"the {type(loader).__name__}"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return _cut(_Restarted(loader), name, title)
    sampler = loader.batch_sampler
    if sampler is None:
        return _cut(_Copies(loader), name, f"{title} with batch_size=None")
    if type(sampler) is BatchSampler:
        return Batches(lambda size: _at(loader, size), sampler.batch_size)
    with rng_preserved():
        drawn = list(itertools.islice(_copied(sampler, {}), _SEEN_BATCHES))
    sizes = {len(each) for each in drawn[:-1] or drawn if hasattr(each, "__len__")}
    if not sizes:
        raise TaskError(f"{name}: {title}'s batch sampler yields no lists of places in the data")
    if len(sizes) > 1:
        return Batches(
            lambda _: _at(loader, None),
            fixed=f"{title}'s batch sampler {type(sampler).__name__} makes batches of "
            f"{min(sizes)} to {max(sizes)} samples; for other batches {_FUNCTION}",
        )
    own = sizes.pop()
    return Batches(lambda size: _at(loader, None if size == own else size), own)


def _at(loader: DataLoader[Any], batch_size: int | None) -> DataLoader[Any]:
    """Copy a loader at a batch size (None: at its own); its generators are copied, not drawn from.

    A copy of the object keeps what its class, its collator and its workers are.
    """
    memo: dict[int, Any] = {}
    clone = copy.copy(loader)
    sampler = _copied(loader.batch_sampler, memo)
    if batch_size is not None and type(sampler) is BatchSampler:
        sampler.batch_size = batch_size
        vars(clone)["batch_size"] = batch_size
    elif batch_size is not None:
        sampler = _resized(sampler, batch_size)
    inner = getattr(sampler, "sampler", None) or _copied(loader.sampler, memo)
    generator = loader.generator
    vars(clone).update(
        batch_sampler=sampler,
        sampler=inner,
        generator=None if generator is None else _copied(generator, memo),
        _iterator=None,
    )
    return clone


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a sampler with the samplers and the generators that it holds; data sets are shared."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Generator):
        generator = torch.Generator(device=value.device)
        generator.set_state(value.get_state())
        memo[id(value)] = generator
        return generator
    if is_generator(value):
        memo[id(value)] = copy.deepcopy(value)
        return memo[id(value)]
    try:
        clone = copy.copy(value)
    except TypeError:  # a generator function's
        return value
    memo[id(value)] = clone
    for key, held in getattr(value, "__dict__", {}).items():
        if isinstance(held, Sampler) or is_generator(held):
            vars(clone)[key] = _copied(held, memo)
    return clone


def _resized(sampler: Any, batch_size: int) -> Any:
    """Return a batch sampler of another size: by its own attribute, else by regrouping places."""
    if isinstance(getattr(sampler, "batch_size", None), int):
        sized = _copied(sampler, {})
        try:
            sized.batch_size = batch_size
            with rng_preserved():
                first = next(iter(_copied(sized, {})), ())
        except Exception:  # of a class that does not want it
            first = ()
        if len(first) == batch_size:
            return sized
    return _Regrouped(sampler, batch_size)


class _Regrouped:
    """A batch sampler's places in the data, in its order, in lists of another length."""

    def __init__(self, sampler: Iterable[Any], batch_size: int) -> None:
        self.batch_size, self._sampler = batch_size, sampler

    def __iter__(self) -> Iterator[list[Any]]:
        places = itertools.chain.from_iterable(self._sampler)
        while batch := list(itertools.islice(places, self.batch_size)):
            yield batch

    def __len__(self) -> int:
        sampler: Any = self._sampler
        own = len(next(iter(_copied(sampler, {})), ()))
        return math.ceil(len(sampler) * own / self.batch_size)


class _Copies:
    """A loader of which each pass goes through a copy."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(_at(self._loader, None))


class _Restarted:
    """A loader of a class with a pass of its own, which finds its generators as they were given."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        held: Mapping[str, Any] = vars(loader)
        owners = [held, *(vars(v) for v in held.values() if isinstance(v, Sampler))]
        found = [value for owner in owners for value in owner.values() if is_generator(value)]
        self._states = [(each, copy.deepcopy(state_of(each))) for each in found]

    def __iter__(self) -> Iterator[Any]:
        for generator, state in self._states:
            put_state(generator, state)
        try:
            yield from self._loader
        finally:
            for generator, state in self._states:
                put_state(generator, state)


def _cut(given: Iterable[Any], name: str, title: str) -> Batches:
    """Return batches of any size, cut from whole ones; at their own size these themselves."""
    with rng_preserved():
        seen = list(itertools.islice(iter(given), _SEEN_BATCHES))
    if not seen:
        raise TaskError(f"{name}: {title} yields no batches; expected at least one")
    own, why = samples_of(seen)
    if why:
        return Batches(lambda _: given, own, f"{title} {why}; for other batches {_FUNCTION}")
    return Batches(lambda size: given if size == own else CutBatches(given, size), own)
