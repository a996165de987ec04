"""How a torch task is run: the same random numbers, any form of batch, and clear errors."""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import random
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.shared.rng_streams import RandomStream
from autoprec.backends.torch.train.rng import TorchGenerators, rng_preserved
from autoprec.backends.torch.train.task_runner import (
    batches,
    build_model,
    build_optimizer,
    compute_loss,
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


class Attributes(dict):
    """A dictionary whose items are its attributes too, a method `to` among them."""

    __getattr__ = dict.__getitem__


def test_a_dictionary_with_attributes_is_moved_item_by_item():
    moved = move(Attributes(x=torch.ones(2), to=torch.ones(3)), "meta")
    assert isinstance(moved, Attributes)
    assert moved.x.is_meta
    assert moved.to.is_meta


def test_a_batch_that_holds_itself_is_named():
    batch = {"x": torch.ones(2)}
    batch["me"] = batch
    with pytest.raises(TaskError, match=r"holds itself.*give its class a method to\(device\)"):
        move(batch, "cpu")


def test_a_model_keeps_its_modules_modes_unless_all_of_it_is_in_evaluation():
    def frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].eval()
        return model

    model = build_model(task(build_model=frozen), "cpu", 0)
    assert [module.training for module in model.modules()] == [True, True, False]
    pretrained = build_model(task(build_model=lambda: frozen().eval()), "cpu", 0)
    assert all(module.training for module in pretrained.modules())


def test_a_loss_module_is_put_on_the_device_too():
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    build_model(task(loss_fn=loss), "meta", 0)
    assert loss.weight.is_meta


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.DataParallel(nn.Linear(4, 1)), "return the model without nn.DataParallel"),
        (lambda: torch.jit.script(nn.Linear(4, 1)), r"return the model before torch\.jit\.script"),
        (lambda: nn.Linear(4, 1, device="meta"), r"to_empty\(device=\"cpu\"\)"),
    ],
)
def test_a_model_that_cannot_be_tuned_is_named(build, message):
    with pytest.raises(TaskError, match=message):
        build_model(task(build_model=build), "cpu", 0)


def test_an_optimizer_that_needs_a_closure_is_named():
    model = build_model(task(), "cpu", 0)
    lbfgs = task(build_optimizer=lambda model: torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TaskError, match=r"returned a LBFGS, whose step\(\) needs a closure"):
        build_optimizer(lbfgs, model)


def test_an_optimizer_with_a_scheduler_of_its_learning_rate_is_one_like_others():
    def warming_up(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    model = build_model(task(), "cpu", 0)
    optimizer = build_optimizer(task(build_optimizer=warming_up), model)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.01


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
    with rng_preserved():
        list(batches(task(), 2, seed=9))
    next(batches(task(), 2, seed=9))
    assert torch.equal(torch.rand(3), expected)


def test_a_stream_of_random_numbers_goes_on_where_it_stopped():
    seed_everything(5)
    whole = torch.rand(4)
    seed_everything(5)
    stream = RandomStream(TorchGenerators())
    with stream.swapped():
        first = torch.rand(2)
    torch.rand(9)
    with stream.swapped():
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), whole)


@pytest.mark.parametrize("whole", [True, False])
def test_a_loaders_workers_end_with_the_stream(whole):
    """Also those that the loader itself would keep, and where its end is not reached."""
    before = set(multiprocessing.active_children())
    data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    stream = batches(task(build_data=lambda size: loader), 4, seed=0)
    next(stream)
    (worker,) = set(multiprocessing.active_children()) - before
    if whole:
        assert len(list(stream)) == 1
    else:
        stream.close()
    worker.join(timeout=60)
    assert worker.exitcode is not None
    assert set(multiprocessing.active_children()) <= before


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


class Cast:
    """A Precision object's autocast."""

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16)


def test_a_loss_function_is_computed_outside_autocast_and_a_training_step_inside():
    seen = []

    def loss(outputs, targets):
        seen.append((torch.is_autocast_enabled("cpu"), outputs.dtype))
        return nn.functional.mse_loss(outputs.float(), targets)

    batch = (torch.ones(2, 4), torch.ones(2))
    model = build_model(task(), "cpu", 0)
    compute_loss(task(loss_fn=loss), model, batch, Cast())
    step = task(loss_fn=None, training_step=lambda model, batch: loss(model(batch[0]), batch[1]))
    compute_loss(step, model, batch, Cast())
    assert seen == [(False, torch.bfloat16), (True, torch.bfloat16)]


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
