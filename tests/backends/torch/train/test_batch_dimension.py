"""Samples are counted where they are, whatever the layout of a batch; and batches are cut there."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.apply.nested_tensors import tensors_in
from autoprec.backends.torch.train.batch_dimension import Samples, find_samples, leading
from autoprec.errors import TaskError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]


def task(make: Callable[[int], Any], **changes: Any) -> Task:
    """A task whose data are one batch made anew for every size, with the sizes asked for noted."""

    def build_data(batch_size: int) -> list[Any]:
        asked.append(batch_size)
        return [make(batch_size)]

    asked: list[int] = []
    build_data.asked = asked  # type: ignore[attr-defined]
    known: dict[str, Any] = {
        "name": "task.py",
        "build_model": lambda: nn.Linear(1, 1),
        "training_step": lambda model, batch: None,
    }
    return Task(build_data=build_data, **(known | changes))


def found(given: Task, batch_size: int) -> tuple[Samples, Any]:
    batch = given.build_data(batch_size)[0]
    given.build_data.asked.clear()  # type: ignore[attr-defined]
    return find_samples(given, batch, batch_size, seed=0), batch


class Attributes(dict):
    """A dictionary whose items are its attributes too, as EasyDict and tokenizers have it."""

    __getattr__ = dict.__getitem__


class Encoding(collections.UserDict):
    """Transformers' BatchEncoding in small."""


@dataclasses.dataclass
class Graph:
    nodes: torch.Tensor
    name: str = "graph"


Pair = collections.namedtuple("Pair", "inputs targets")


def packed(count: int) -> Any:
    sequences = [torch.arange(1.0 + length % 3).unsqueeze(1) for length in range(count)]
    return nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)


def nested(layout: torch.layout) -> Callable[[int], torch.Tensor]:
    def make(count: int) -> torch.Tensor:
        parts = [torch.full((1 + index % 3, 2), float(index)) for index in range(count)]
        return torch.nested.nested_tensor(parts, layout=layout)

    return make


LAYOUTS: dict[str, Callable[[int], Any]] = {
    "samples first": lambda n: (torch.randn(n, 3), torch.randn(n)),
    "time first": lambda n: (torch.randn(100, n, 3), torch.randn(n)),
    "time first, as long as the batch": lambda n: (torch.randn(32, n, 3), torch.randn(n)),
    "time first in targets too": lambda n: (torch.randn(9, n, 3), torch.randn(9, n)),
    "channels like the batch": lambda n: (torch.randn(n, 32, 5), torch.randn(n)),
    "a list of images": lambda n: ([torch.randn(3, 8 + i % 2, 9) for i in range(n)], [{}] * n),
    "images with as many channels": lambda n: ([torch.randn(32, 4) for _ in range(n)], ["a"] * n),
    "positions before inputs": lambda n: (torch.arange(7.0), torch.randn(n, 7)),
    "a mapping": lambda n: {"scale": torch.tensor(1.0), "x": torch.randn(n, 2)},
    "attributes": lambda n: Attributes(x=torch.randn(n, 2), to=torch.randn(n)),
    "a tokenizer's": lambda n: Encoding(x=torch.randn(n, 2)),
    "a dataclass": lambda n: Graph(torch.randn(n, 2)),
    "a named tuple": lambda n: Pair(torch.randn(n, 2), torch.randn(n)),
    "a packed sequence": lambda n: (packed(n), torch.randn(n)),
    "nested": lambda n: (nested(torch.strided)(n), torch.randn(n)),
    "jagged": lambda n: (nested(torch.jagged)(n), torch.randn(n)),
    "joined graphs with a label each": lambda n: (torch.randn(5 * n + 1, 2), torch.randn(n)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_size", [1, 2, 8, 32])
def test_samples_are_counted_where_they_are(layout: str, batch_size: int) -> None:
    samples, batch = found(task(LAYOUTS[layout]), batch_size)
    assert samples.count(batch) == batch_size
    assert samples.warning == ""


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "graphs" not in name])
def test_a_batch_is_cut_where_its_samples_are(layout: str) -> None:
    samples, batch = found(task(LAYOUTS[layout]), 8)
    assert samples.unsplittable_reason == ""
    halves = samples.halves(batch)
    assert [type(half) for half in halves] == [type(batch)] * 2
    assert [samples.count(half) for half in halves] == [4, 4]


def test_halves_together_are_the_whole() -> None:
    samples, batch = found(task(lambda n: (torch.randn(100, n, 3), torch.randn(n))), 8)
    first, second = samples.halves(batch)
    assert torch.equal(torch.cat([first[0], second[0]], 1), batch[0])
    assert torch.equal(torch.cat([first[1], second[1]]), batch[1])
    samples, batch = found(task(lambda n: (packed(n), torch.randn(n))), 8)
    parts = [nn.utils.rnn.unpack_sequence(part[0]) for part in samples.halves(batch)]
    whole = nn.utils.rnn.unpack_sequence(batch[0])
    assert all(torch.equal(a, b) for a, b in zip(parts[0] + parts[1], whole, strict=True))


def test_what_holds_no_samples_is_in_both_halves() -> None:
    samples, batch = found(task(lambda n: (torch.arange(7.0), torch.randn(n, 7), "text", None)), 8)
    for half in samples.halves(batch):
        assert torch.equal(half[0], batch[0])
        assert half[1].shape == (4, 7)
        assert half[2:] == ("text", None)


def test_samples_first_need_no_second_batch() -> None:
    given = task(LAYOUTS["samples first"])
    found(given, 32)
    assert given.build_data.asked == []
    given = task(LAYOUTS["time first"])
    found(given, 32)
    assert given.build_data.asked == [8]


@pytest.mark.parametrize(
    ("make", "asked", "count"),
    [
        (lambda n: torch.randn(min(n, 20), 512), 512, 20),
        (lambda n: torch.randn(min(n, 20), 512), 1024, 20),
        (lambda n: torch.randn(100, min(n, 300), 512), 512, 300),
        (lambda n: torch.randn(50, 4), 32, 50),
    ],
    ids=["features as many as asked", "shorter than both", "time first, short", "a fixed batch"],
)
def test_data_that_hold_fewer_samples_are_counted(make: Any, asked: int, count: int) -> None:
    samples, batch = found(task(make), asked)
    assert samples.count(batch) == count


def test_a_smaller_last_batch_is_counted_in_the_same_dimension() -> None:
    samples, _ = found(task(lambda n: torch.randn(100, n, 3)), 32)
    assert samples.count(torch.randn(100, 5, 3)) == 5


def test_what_follows_no_size_is_told_and_can_be_counted_by_the_task() -> None:
    def make(n: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(7 * n - 3, 2), "graph": torch.arange(7 * n - 3) // 7}

    samples, batch = found(task(make), 32)
    assert samples.count(batch) == 221
    assert "count_samples(batch) -> int" in samples.warning
    assert "221 for build_data(32), 53 for build_data(8)" in samples.unsplittable_reason
    own = task(make, count_samples=lambda batch: int(batch["graph"][-1]) + 1)
    samples, batch = found(own, 32)
    assert samples.count(batch) == 32
    assert samples.warning == ""
    assert samples.unsplittable_reason


@pytest.mark.parametrize("count", [0, 2.0, None, True])
def test_a_wrong_count_is_named(count: Any) -> None:
    samples, batch = found(task(LAYOUTS["samples first"], count_samples=lambda batch: count), 8)
    with pytest.raises(TaskError, match=r"count_samples returned .*expected a positive integer"):
        samples.count(batch)


def test_data_that_bear_one_size_only_are_counted_as_they_are() -> None:
    def make(n: int) -> torch.Tensor:
        if n != 32:
            raise ValueError("32 only")
        return torch.randn(100, n)

    samples, batch = found(task(make), 32)
    assert samples.count(batch) == 100


def test_a_batch_without_tensors_is_an_error_unless_the_task_counts_it() -> None:
    with pytest.raises(TaskError, match="without any tensor was given"):
        found(task(lambda n: "text"), 8)
    samples, batch = found(task(lambda n: "text" * n, count_samples=lambda b: len(b) // 4), 8)
    assert samples.count(batch) == 8
    samples, batch = found(task(lambda n: ["text"] * n), 8)
    assert samples.count(batch) == 8


def test_what_refers_to_itself_is_gone_into_once() -> None:
    class Node:
        def __init__(self) -> None:
            self.me, self.x = self, torch.ones(5)

    assert leading(Node()) == 5
    assert [len(tensor) for tensor in tensors_in(Node())] == [5]
