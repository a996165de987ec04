"""The stream hands out the same batches, as copies, within its memory budget."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from autoprec.backends.torch.trace.tracer import batch_stream
from autoprec.backends.torch.train.batch_digest import digest
from tests.backends.torch.traced import task

pytestmark = pytest.mark.torch


def test_a_stream_beyond_its_budget_draws_again_what_it_drew_before():
    small = batch_stream(task(), 8, seed=0, keep_bytes=1)
    plenty = batch_stream(task(), 8, seed=0)
    pinned = small.batch(5, pin=True)
    for index in (0, 3, 9, 2, 5):
        assert digest(small.batch(index)) == digest(plenty.batch(index))
    assert digest(pinned) == digest(small.batch(5))
    assert small.reproducible
    small.close()


def test_a_stream_beyond_its_budget_cycles_where_data_do_not_repeat():
    turns = itertools.count()

    def build(batch_size: int) -> Any:
        turn = next(turns)
        for index in range(9):
            yield torch.full((batch_size, 1), float(100 * turn + index)), torch.ones(batch_size)

    stream = batch_stream(task(build_data=build), 2, seed=0, keep_bytes=40)
    kept = [float(stream.batch(index)[0][0]) for index in range(6)]
    assert not stream.reproducible
    assert [float(stream.batch(index)[0][0]) for index in range(6)] == kept


def ragged(values: list[list[float]], layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(v) for v in values], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(
    "make",
    [
        lambda v: ragged([v, [1.0]], torch.jagged),
        lambda v: ragged([v, [1.0]], torch.strided),
        lambda v: torch.tensor(v).to_sparse(),
    ],
)
def test_batches_of_other_layouts_are_told_apart(make):
    first, same, other = make([0.0, 2.0]), make([0.0, 2.0]), make([0.0, 3.0])
    assert digest((first, 1)) == digest((same, 1))
    assert digest((first, 1)) != digest((other, 1))


def test_a_batch_handed_out_is_a_copy():
    stream = batch_stream(task(), 2, seed=0)
    before = digest(stream.batch(0))
    stream.batch(0)[0].zero_()
    assert digest(stream.batch(0)) == before


def test_a_slice_of_large_data_is_kept_without_the_rest() -> None:
    """A copy of all the data for every batch, and for every step, was memory and time."""
    data = torch.randn(3000, 4).T.contiguous().T

    def slices(batch_size: int) -> Any:
        for start in range(0, len(data), batch_size):
            part = data[start : start + batch_size]
            yield {"inputs": part, "again": (part, 1)}, part[:, 0]

    stream = batch_stream(task(build_data=slices), 8, seed=0)
    for index in (0, 5):
        inputs, targets = stream.batch(index)
        assert inputs["again"] == (inputs["inputs"], 1)
        for found, numbers in ((inputs["inputs"], 32), (targets, 8)):
            assert found.untyped_storage().nbytes() == 4 * numbers
        assert torch.equal(inputs["inputs"], data[8 * index : 8 * index + 8])
        assert inputs["inputs"].stride() == (1, 8)
    stream.close()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_that_is_handed_out_trains_as_it_did() -> None:
    def texts(batch_size: int) -> Any:
        while True:
            yield ragged([[0.0, 2.0, 1.0]] * (batch_size - 1) + [[1.0]], torch.jagged), 1.0

    stream = batch_stream(task(build_data=texts), 4, seed=0)
    given = stream.batch(0)[0]
    rows = given * torch.ones(1, requires_grad=True) + given
    layer = torch.nn.Linear(1, 2)
    torch.stack([row.mean() for row in layer(rows.unsqueeze(-1)).unbind()]).sum().backward()
    assert layer.weight.grad is not None
    stream.close()
