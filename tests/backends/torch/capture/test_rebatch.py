"""A loader at another batch yields the same samples in the same order; at its own, its batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from autoprec.backends.torch.capture.rebatch import Batches, rebatch
from autoprec.errors import TaskError
from tests.backends.torch.capture.captured import first

pytestmark = pytest.mark.torch


class Texts(Dataset[torch.Tensor]):
    """Samples 0 to 63, of different lengths."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.full((1 + place % 5,), float(place + 1))


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "ids": pad_sequence(samples, batch_first=True),
        "last": torch.stack([s[-1] for s in samples]),
    }


def places(data: Any) -> list[list[int]]:
    """Return which samples each batch holds."""
    return [[int(value) - 1 for value in batch["last"]] for batch in data]


class Buckets:
    """A batch sampler of someone's own, whose size nothing can set."""

    def __init__(self, size: int = 4) -> None:
        self._size = size

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(64), key=lambda place: place % 5)
        return (order[start : start + self._size] for start in range(0, 64, self._size))

    def __len__(self) -> int:
        return 16


class TokenBudget:
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3, 4], [5, 6, 7, 8], [9])

    def __len__(self) -> int:
        return 4


class Sized(BatchSampler):
    """A subclass of torch's, whose size is an attribute."""


class Streaming(IterableDataset[Any]):
    """A data set that yields whole batches of 6."""

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, 36, 6):
            numbers = torch.arange(start, start + 6)
            yield {"x": numbers.float().reshape(6, 1), "last": numbers + 1}


def seeded(build: Any) -> Any:
    torch.manual_seed(5)
    random.seed(5)
    return build()


def custom(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Texts(), batch_sampler=sampler, collate_fn=padded)


def plain(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Texts(), collate_fn=padded, **{"batch_size": 8, **settings})


LOADERS: dict[str, Any] = {
    "shuffled": lambda: plain(shuffle=True),
    "in order": plain,
    "generator of its own": lambda: plain(shuffle=True, generator=torch.Generator().manual_seed(9)),
    "last batch dropped": lambda: plain(batch_size=6, drop_last=True),
    "workers": lambda: plain(shuffle=True, num_workers=1),
    "custom batch sampler": lambda: custom(Buckets()),
    "sized batch sampler": lambda: custom(Sized(RandomSampler(Texts()), 4, drop_last=False)),
    "streaming": lambda: DataLoader(Streaming(), batch_size=None),
}


@pytest.mark.parametrize("name", list(LOADERS))
def test_at_its_own_batch_a_loader_yields_what_it_yields(name: str) -> None:
    loader = LOADERS[name]()
    found = rebatch(LOADERS[name](), "task")
    assert found.own is not None
    expected = seeded(lambda: places(loader))
    for _ in range(2):
        assert seeded(lambda: places(found.build(found.own))) == expected


@pytest.mark.parametrize("batch_size", [2, 8, 16])
@pytest.mark.parametrize("name", list(LOADERS))
def test_at_another_batch_it_yields_the_same_samples_in_the_same_order(
    name: str, batch_size: int
) -> None:
    found = rebatch(LOADERS[name](), "task")
    assert found.fixed == ""
    batches = seeded(lambda: places(found.build(batch_size)))
    assert {len(batch) for batch in batches[:-1]} == {batch_size}
    whole = seeded(lambda: places(found.build(found.own)))
    joined, expected = (list(chain.from_iterable(each)) for each in (batches, whole))
    count = min(len(joined), len(expected))
    assert count > 24
    assert joined[:count] == expected[:count]


@pytest.mark.parametrize("name", ["shuffled", "custom batch sampler"])
def test_a_collator_pads_the_samples_of_a_batch_together(name: str) -> None:
    found = rebatch(LOADERS[name](), "task")
    for batch in seeded(lambda: first(found.build(16), 4)):
        rows = [Texts()[int(last) - 1] for last in batch["last"]]
        assert torch.equal(batch["ids"], pad_sequence(rows, batch_first=True))


def test_the_users_generators_are_not_advanced() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = plain(shuffle=True, generator=generator)
    before, process = generator.get_state(), torch.get_rng_state()
    found = rebatch(loader, "task")
    assert torch.equal(torch.get_rng_state(), process)
    first(found.build(8))
    first(found.build(4))
    assert torch.equal(generator.get_state(), before)


def test_a_class_with_a_pass_of_its_own_is_cut_and_finds_its_generator_as_it_was() -> None:
    class Moving(DataLoader[Any]):
        def __iter__(self) -> Any:
            for features, targets in super().__iter__():
                yield features * 2, targets

    data = TensorDataset(torch.arange(32.0).reshape(32, 1), torch.arange(32))
    generator = torch.Generator().manual_seed(3)
    loader = Moving(data, batch_size=4, shuffle=True, generator=generator)
    found = rebatch(loader, "task")
    one, again = (torch.cat([targets for _, targets in found.build(8)]) for _ in range(2))
    assert torch.equal(one, again)
    assert sorted(one.tolist()) == list(range(32))
    assert all(len(targets) == 8 for _, targets in found.build(8))


FIXED: dict[str, tuple[Any, int | None, str]] = {
    "padded batches": (
        lambda: [padded([Texts()[place] for place in range(s, s + 4)]) for s in (0, 1, 5, 9)],
        4,
        "the list pads each batch by itself",
    ),
    "token budget": (
        lambda: custom(TokenBudget()),
        None,
        "TokenBudget makes batches of 2 to 4 samples",
    ),
    "time first": (
        lambda: [(torch.zeros(7, 4, 2), torch.zeros(4))] * 3,
        7,
        "whose tensors do not all have the samples first",
    ),
    "objects": (lambda: [object()] * 3, None, "hold more than tensors"),
}


@pytest.mark.parametrize("name", list(FIXED))
def test_what_cannot_be_rebatched_keeps_its_batch_and_says_why(name: str) -> None:
    build, own, reason = FIXED[name]
    found = rebatch(build(), "task")
    assert found.own == own
    assert reason in found.fixed
    assert "function of the batch size" in found.fixed
    assert len(list(found.build(64))) == len(list(build()))


def test_an_iterator_is_gone_through_again_from_its_first_batch() -> None:
    def stream() -> Iterator[torch.Tensor]:
        for start in range(0, 40, 4):
            yield torch.arange(start, start + 4)

    found = rebatch(stream(), "task")
    assert found.own == 4
    for size in (4, 8, 4):
        assert torch.equal(torch.cat(first(found.build(size), 2)), torch.arange(2 * size))


def test_batches_that_cannot_be_joined_after_all_are_told() -> None:
    loader = [torch.zeros(4, 2)] * 5 + [torch.zeros(4, 3)]
    with pytest.raises(TaskError, match="cannot be joined, unlike its first ones"):
        list(rebatch(loader, "task").build(24))


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(TaskError, match="yields no batches"):
        rebatch([], "task")


def test_lists_of_texts_are_cut_with_the_tensors() -> None:
    loader = [
        {"x": torch.arange(s, s + 4), "names": [f"n{i}" for i in range(s, s + 4)]} for s in (0, 4)
    ]
    found: Batches = rebatch(loader, "task")
    [batch] = found.build(8)
    assert batch["names"] == [f"n{i}" for i in range(8)]
    small = first(found.build(3), 2)
    assert [each["names"] for each in small] == [["n0", "n1", "n2"], ["n3", "n4", "n5"]]
