"""How a torch task is run: the same random numbers, any form of batch, and clear errors."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.base import Task
from autoprec.backends.torch.rng import RngState, preserved
from autoprec.backends.torch.running import (
    batches,
    build_model,
    build_optimizer,
    compute_loss,
    count_samples,
    materialize,
    move,
    seed_everything,
)
from autoprec.errors import TaskError

pytestmark = pytest.mark.torch


def generator(batch_size: int) -> Any:
    for _ in range(3):
        yield torch.randn(batch_size, 4), torch.randn(batch_size)


def task(**changes: Any) -> Task:
    known: dict[str, Any] = {
        "name": "task.py",
        "build_model": lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
        "build_data": generator,
        "loss_fn": nn.functional.mse_loss,
    }
    return Task(**(known | changes))


@dataclasses.dataclass
class Graph:
    nodes: torch.Tensor
    name: str = "graph"


Pair = collections.namedtuple("Pair", "a b")


def test_nested_batches_are_moved_and_keep_their_types():
    x = torch.ones(2)
    batch = {"a": [x, (x, Pair(x, 1))], "g": Graph(x), "o": collections.OrderedDict(k=x), "n": None}
    moved = move(batch, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1][1].a.is_meta
    assert isinstance(moved["a"][1][1], Pair)
    assert moved["g"].nodes.is_meta
    assert isinstance(moved["o"], collections.OrderedDict)
    assert moved["o"]["k"].is_meta
    assert moved["n"] is None
    assert not batch["g"].nodes.is_meta


def test_samples_are_counted_by_the_first_tensor():
    assert count_samples((torch.ones(7, 3), torch.ones(7))) == 7
    assert count_samples({"scale": torch.tensor(1.0), "x": torch.ones(5, 2)}) == 5
    assert count_samples(Graph(torch.ones(4))) == 4
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    assert count_samples((packed, torch.ones(2))) == 2
    with pytest.raises(TaskError, match="without any tensor"):
        count_samples("text")


def test_data_do_not_depend_on_what_training_draws():
    first = [x for x, _ in batches(task(), 5, seed=3)]
    second = []
    for x, _ in batches(task(), 5, seed=3):
        second.append(x)
        torch.randn(17)
        random.random()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_data_start_again_at_their_end_where_asked():
    stream = batches(task(), 2, seed=0, repeat=True)
    assert len([next(stream) for _ in range(8)]) == 8
    stream.close()
    assert len(list(batches(task(), 2, seed=0))) == 3


def test_drawing_data_leaves_the_outside_random_numbers_alone():
    seed_everything(1)
    expected = torch.rand(3)
    seed_everything(1)
    with preserved():
        list(batches(task(), 2, seed=9))
    next(batches(task(), 2, seed=9))
    assert torch.equal(torch.rand(3), expected)


def test_a_stream_of_random_numbers_goes_on_where_it_stopped():
    seed_everything(5)
    whole = torch.rand(4)
    seed_everything(5)
    state = RngState.capture()
    with state.swapped():
        first = torch.rand(2)
    torch.rand(9)
    with state.swapped():
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), whole)


def test_a_loaders_workers_end_with_the_stream():
    data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    assert len(list(batches(task(build_data=lambda size: loader), 4, seed=0))) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"build_data": lambda size: []}, "yielded no batches"),
        ({"build_data": lambda size: None}, "returned None, expected an iterable"),
        ({"build_data": lambda size: 3}, "returned a int"),
        ({"build_data": lambda size: [torch.ones(3)]}, r"yielded a Tensor, expected \(inputs"),
        ({"build_data": lambda size: [(1, 2, 3)]}, "yielded a tuple of 3 items"),
    ],
)
def test_wrong_data_are_named(changes, message):
    with pytest.raises(TaskError, match=message):
        list(batches(task(**changes), 2, seed=0))


def test_a_training_step_may_take_any_form_of_batch():
    wild = task(build_data=lambda size: [{"x": 1}], training_step=lambda m, b: None)
    assert list(batches(wild, 2, seed=0)) == [{"x": 1}]


def test_what_the_functions_return_is_checked():
    with pytest.raises(TaskError, match=r"build_model returned a int, expected a torch\.nn\.Mod"):
        build_model(task(build_model=lambda: 3), "cpu", 0)
    model = build_model(task(), "cpu", 0)
    with pytest.raises(TaskError, match="build_optimizer returned None"):
        build_optimizer(task(build_optimizer=lambda m: None), model)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(TaskError, match="nothing to train"):
        build_optimizer(task(), frozen)
    assert isinstance(build_optimizer(task(), model), torch.optim.AdamW)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, t: o - t, r"shape \(2,\), expected a scalar"),
        (lambda o, t: 1.0, "returned a float"),
        (lambda o, t: (o - t).mean().detach(), "without a gradient"),
    ],
)
def test_a_wrong_loss_is_named(loss, message):
    batch = (torch.ones(2, 4), torch.ones(2))
    with pytest.raises(TaskError, match=message):
        compute_loss(task(loss_fn=loss), build_model(task(), "cpu", 0), batch, None)


def test_a_loss_function_is_needed():
    with pytest.raises(TaskError, match="neither loss_fn"):
        compute_loss(task(loss_fn=None), nn.Identity(), (1, 2), None)


def test_a_loss_that_is_not_finite_is_not_an_error_here():
    batch = (torch.full((2, 4), torch.inf), torch.ones(2))
    loss = compute_loss(task(), build_model(task(), "cpu", 0), batch, None)
    assert not torch.isfinite(loss)
    assert loss.dtype is torch.float32


def test_lazy_parameters_are_made_the_same_way_each_time():
    lazy = task(build_model=lambda: nn.Sequential(nn.LazyLinear(1), nn.Flatten(0)))
    weights = []
    for _ in range(2):
        model = build_model(lazy, "cpu", 4)
        materialize(lazy, model, (torch.ones(2, 4), torch.ones(2)), 4)
        weights.append(model[0].weight.detach())
    assert torch.equal(*weights)
