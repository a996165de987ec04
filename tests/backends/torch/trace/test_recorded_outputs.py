"""Outputs of a batch and of its parts are put together and compared, in whatever order they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends.torch.trace.recorded_outputs import Parts, RecordedOutputs, outputs_error

pytestmark = pytest.mark.torch

WHOLE = torch.tensor([[1.0, 0], [2, 1], [3, 2], [4, 5]])


def parts(*rows: Any) -> Parts:
    return [[torch.tensor(each)] for each in rows]


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ([[WHOLE]], 0.0),
        ([WHOLE[:2].unbind(0), []], 0.0),  # another number of them: not compared
        (parts([[1.0, 0], [2, 1]], [[3.0, 2], [4, 5]]), 0.0),
        (parts([[1.0, 0], [3, 2]], [[2.0, 1], [4, 5]]), 0.0),  # two batches, one after the other
        (parts([[2.0, 1], [1, 0]], [[3.0, 2], [4, 5]]), pytest.approx(2 / 19**0.5)),
        (parts([[1.0, 0]], [[3.0, 2]]), 0.0),  # no row for every sample: not compared
        ([[WHOLE.flip(0)]], pytest.approx((72 / 19) ** 0.5)),
        ([[WHOLE * torch.tensor([[1.0], [1], [1], [math.nan]])]], None),
        ([[WHOLE[:, :1]]], None),
        ([[]], 0.0),
    ],
)
def test_outputs_are_put_together_and_compared(found: Parts, error: Any) -> None:
    assert outputs_error(found, [[WHOLE]]) == error


@pytest.mark.parametrize("way", ["two views", "time first", "samples first"])
def test_the_rows_of_a_sample_need_not_be_side_by_side(way: str) -> None:
    model = nn.Linear(5, 3)

    def step(x: Tensor) -> None:
        if way == "two views":
            model(torch.cat([x, -x, x.flip(1)]).flatten(0, 1))
        else:
            model((x if way == "samples first" else x.transpose(0, 1)).reshape(-1, 5))

    batch = torch.randn(8, 6, 5)
    found = []
    for given in (batch.chunk(4), (batch,)):
        outputs = RecordedOutputs()
        with outputs.of(model):
            for part in given:
                outputs.next_part()
                step(part)
        found.append(outputs.found)
    error = outputs_error(*found)
    assert error is not None
    assert error < 1e-6
    doubled = outputs_error([[2 * each for each in part] for part in found[0]], found[1])
    assert doubled is not None
    assert doubled > 0.5


def test_of_many_calls_the_first_are_recorded() -> None:
    model = nn.Identity()
    outputs = RecordedOutputs(most_calls=2)
    with outputs.of(model):
        for count in (3, 1):
            outputs.next_part()
            for _ in range(count):
                model(torch.ones(2))
    assert [len(part) for part in outputs.found] == [2, 1]
