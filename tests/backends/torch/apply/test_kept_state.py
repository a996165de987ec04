"""A skipped float16 step spoils no state, wherever the model's or the loss's code keeps it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backends.torch.buffered import samples
from tests.backends.torch.operated import FLOAT16, adam, apply, float16

pytestmark = pytest.mark.torch

FIXED = float16(mode="fixed", initial=256.0)


class Helper:
    """An object of no framework's."""

    def __init__(self) -> None:
        self.average = torch.zeros(8)
        self.parts = {"sum": torch.zeros(8)}


class Keeping(nn.Module):
    """Keeps averages of its outputs in everything but buffers."""

    later: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.in_place, self.replaced = torch.zeros(8), torch.zeros(8)
        self.through_data = torch.zeros(8)
        self.pair = (torch.zeros(8), torch.zeros(8))
        self.queue: list[Tensor] = []
        self.ring: deque[Tensor] = deque(maxlen=3)
        self.stats: dict[str, Any] = {"mean": torch.zeros(8), "by_class": [torch.zeros(8)]}
        self.helper = Helper()
        self.new_dict, self.new_list = {"sum": torch.zeros(8)}, [torch.zeros(8)]
        self.new_object = Helper()
        self.first: Tensor | None = None
        self.was_number: Any = 0.0
        self.number = 0.0
        self.hidden: Tensor | None = None
        self.pointer, self.is_ready = 0, False
        self.counts, self.range = [0, 0], (0.0, 0.0)
        self.codebook = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        mean = h.detach().float().mean(0)
        self.in_place.lerp_(mean, 0.1)
        self.through_data.data.mul_(0.9).add_(mean)
        self.codebook.data.mul_(0.9).add_(mean)
        self.replaced = 0.9 * self.replaced + mean
        self.pair = (self.pair[0] + mean, self.pair[1].add_(mean))
        self.queue.append(mean)
        self.ring.append(mean)
        self.stats["mean"] += mean
        self.stats["made"] = mean
        self.stats["by_class"][0].add_(mean)
        self.helper.average = self.helper.average + mean
        self.helper.parts["sum"] += mean
        self.new_dict = {"sum": self.new_dict["sum"] + mean}
        self.new_list = [*self.new_list[-3:], mean]
        self.new_object = copy.copy(self.new_object)
        self.new_object.average = self.new_object.average + mean
        self.first = mean if self.first is None else self.first
        self.was_number = 0.9 * self.was_number + mean
        self.number = 0.9 * self.number + float(mean.mean())
        self.pointer = (self.pointer + len(x)) % 64
        self.is_ready = True
        self.counts[0] += 1
        self.range = min(self.range[0], len(x) - self.pointer), self.range[1] + 1.0
        self.hidden = h  # with its graph, to be detached by the next step
        if not hasattr(self, "later"):
            self.later = torch.zeros(8)
        self.later += mean
        return h


def held(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every tensor, None and number under a value, with its name."""
    if isinstance(value, Tensor | int | float | None):
        yield name, value.detach().clone() if isinstance(value, Tensor) else value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from held(each, f"{name}.{key}")
    elif isinstance(value, list | tuple | deque):
        for index, each in enumerate(value):
            yield from held(each, f"{name}[{index}]")
    elif isinstance(value, Helper):
        yield from held(vars(value), name)


def state(model: nn.Module) -> dict[str, Any]:
    internal = vars(nn.Module())
    found = {k: v for k, v in vars(model).items() if k not in internal}
    return dict(held(found | {"codebook": getattr(model, "codebook", None)}))


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(each, other[name]) if isinstance(each, Tensor) else each == other[name]
        for name, each in one.items()
    )


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_skipped_step_leaves_what_the_model_keeps_as_it_was(at: int) -> None:
    torch.manual_seed(0)
    model = Keeping()
    precision = apply(FLOAT16, model, adam(model))
    for index, (inputs, targets) in enumerate(samples(7, overflowing=[at])):
        before = state(model)
        loss = nn.functional.cross_entropy(precision.forward(inputs), targets)
        assert precision.backward_and_step(loss) is (index != at)
        assert alike(before, state(model)) is (index == at)


AVERAGE = torch.zeros(8)


class Slotted:
    __slots__ = ("average",)

    def __init__(self) -> None:
        self.average = torch.zeros(8)


class Elsewhere(nn.Module):
    """Keeps averages in its class, in a global variable, and in slots."""

    average = torch.zeros(8)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.slotted = nn.Linear(6, 8), Slotted()

    def forward(self, x: Tensor) -> Tensor:
        global AVERAGE  # noqa: PLW0603
        h: Tensor = self.linear(x)
        mean = h.detach().float().mean(0)
        AVERAGE = 0.9 * AVERAGE + mean
        type(self).average = 0.9 * type(self).average + mean
        self.slotted.average = 0.9 * self.slotted.average + mean
        return h

    def sums(self) -> Tensor:
        return torch.stack([AVERAGE, self.average, self.slotted.average])


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_skipped_step_leaves_nothing_infinite_in_global_variables_and_classes(at: int) -> None:
    model = Elsewhere()
    precision = apply(FLOAT16, model, adam(model))
    for index, (inputs, targets) in enumerate(samples(7, overflowing=[at])):
        loss = nn.functional.cross_entropy(precision.forward(inputs), targets)
        assert bool(model.sums().isfinite().all()) is (index != at)
        assert precision.backward_and_step(loss) is (index != at)
        assert model.sums().isfinite().all()


class AveragedLoss(nn.Module):
    """A loss that keeps averages of itself."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.plain, self.number = torch.zeros(()), 0.0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, targets)
        self.average.lerp_(loss.detach(), 0.1)
        self.plain = 0.9 * self.plain + loss.detach()
        self.number = 0.9 * self.number + loss.item()
        return loss

    def is_finite(self) -> bool:
        return bool((self.average + self.plain + self.number).isfinite())


SHARED = AveragedLoss().eval()  # not taken for one of the loop's modules


def loss_by_a_global_one(outputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = SHARED(outputs, targets)
    return loss


def closure(loss: AveragedLoss) -> Callable[..., Tensor]:
    return lambda outputs, targets: 2.0 * loss(outputs, targets)


class Trainer:
    """A loop in an object, which holds the loss."""

    def __init__(self, loss: AveragedLoss) -> None:
        self.loss = loss

    def train(self, precision: Any, data: Any) -> None:
        for inputs, targets in data:
            precision.backward_and_step(self.loss(precision.forward(inputs), targets))


@pytest.mark.parametrize("way", ["at hand", "made later", "in an object", "closure", "global"])
def test_a_skipped_step_leaves_nothing_infinite_in_a_loss(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    loss = SHARED if way == "global" else None if way == "made later" else AveragedLoss()
    data = samples(7, overflowing=[1, 5])
    precision = (
        _applied(model) if way in ("closure", "global") else apply(FLOAT16, model, adam(model))
    )
    loss = loss or AveragedLoss()
    known = []
    if way == "in an object":
        Trainer(loss).train(precision, data)
    else:
        for inputs, targets in data:
            outputs = precision.forward(inputs)
            if way == "closure":
                found = precision.compute_loss(closure(loss), outputs, targets)
            elif way == "global":
                found = precision.compute_loss(loss_by_a_global_one, outputs, targets)
            else:
                found = loss(outputs, targets)
            precision.backward_and_step(found)
            known.append(float(loss.average))
        assert known[4] == known[5] != known[6]
    assert precision.skipped == 2
    assert loss.is_finite()


def _applied(model: nn.Module) -> Any:
    """Apply where no loss is at hand."""
    return apply(FLOAT16, model, adam(model))


def test_what_shares_the_memory_of_weights_is_not_put_back() -> None:
    """Of two optimizers one steps, the other is skipped: the first one's update stays."""

    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)
            self.view = self.one.weight.data

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(1e6 * x)

    model = Viewing()
    first, second = adam(model.one), adam(model.two)
    precision = apply(FLOAT16, model, first, second)
    inputs, targets = samples(1)[0]
    before = model.view.clone()
    for outputs, optimizer in zip(precision.forward(inputs), (first, second), strict=True):
        loss = nn.functional.cross_entropy(outputs, targets)
        precision.backward(loss, optimizer=optimizer)
    assert precision.step(first)
    assert not precision.step(second)
    assert not torch.equal(before, model.view)


class Queue(nn.Module):
    """Keys of the batches before, as contrastive losses keep them; a number says where to go on."""

    keys: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.at = nn.Linear(6, 4), 0
        self.register_buffer("keys", torch.zeros(12, 4))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        self.keys[self.at : self.at + len(h)] = h.detach()
        self.at = (self.at + len(h)) % len(self.keys)
        return h


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_queue_goes_on_where_its_last_update_ended(at: int) -> None:
    """Where the number went on alone, the rows of a skipped step were left out."""
    results = []
    data = samples(6, overflowing=[at])
    for batches in (data, [batch for index, batch in enumerate(data) if index != at]):
        torch.manual_seed(0)
        model = Queue()
        precision = apply(FIXED, model, adam(model))
        for inputs, targets in batches:
            loss = nn.functional.cross_entropy(precision.forward(inputs[1:5]), targets[1:5])
            precision.backward_and_step(loss)
        results.append((model.at, model.keys))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


class SetByData(nn.Module):
    """Sets its scale by its first batch, and remembers by a flag that it did so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        if not self.is_set:
            self.scale.data.copy_(1.0 / h.detach().float().std(0))
            self.is_set = True
        return h * self.scale


def test_weights_that_a_skipped_first_step_set_by_its_data_are_set_anew() -> None:
    model = SetByData()
    precision = apply(FIXED, model, adam(model))
    steps = []
    for inputs, targets in samples(4, overflowing=[0]):
        loss = nn.functional.cross_entropy(precision.forward(inputs), targets)
        steps.append(precision.backward_and_step(loss))
    assert steps == [False, True, True, True]
    assert model.scale.isfinite().all()


def test_what_is_data_and_what_is_left_for_the_loop_stays() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.steps, self.doing, self.shown = 0, "nothing", None
            self.table = [torch.zeros(2) for _ in range(2000)]

        def forward(self, x: Tensor) -> Tensor:
            self.steps, self.doing = self.steps + 1, "forward"
            self.shown = self.last = len(x)
            self.table.append(torch.ones(2))
            found: Tensor = self.linear(x)
            return found

    model = Counting()
    precision = apply(FLOAT16, model, adam(model))
    for inputs, targets in samples(3, overflowing=[0, 1, 2]):
        loss = nn.functional.cross_entropy(precision.forward(inputs), targets)
        precision.backward_and_step(loss)
    assert (model.steps, len(model.table)) == (0, 2003)
    assert (model.doing, model.shown, model.last) == ("forward", 8, 8)


CONSTANT = torch.ones(3)


class Scaling(nn.Module):
    """Reads tensors that nothing changes."""

    parts = torch.ones(3)

    def __init__(self) -> None:
        super().__init__()
        self.constants, self.eps = {"scale": torch.ones(3), "list": [torch.zeros(3)]}, 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * self.constants["scale"] * CONSTANT * self.parts + self.eps


def test_a_model_without_such_state_is_searched_at_first_and_then_left_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), Scaling())
    precision = apply(FLOAT16, model, adam(model))
    for inputs, targets in samples(4):
        precision.backward_and_step(nn.functional.cross_entropy(precision.forward(inputs), targets))
    assert precision.scaler.buffers is not None
    assert not precision.scaler.buffers._held.keeps


def test_nothing_of_it_keeps_the_model_or_a_loss_alive_nor_is_copied() -> None:
    model, loss = Keeping(), AveragedLoss()
    precision = apply(FLOAT16, model, adam(model))
    for inputs, targets in samples(2):
        precision.backward_and_step(loss(precision.forward(inputs), targets))
    model.hidden = None
    copied = copy.deepcopy(model)
    before = state(copied)
    with precision.autocast():
        precision.scaler.buffers.after_skip()  # type: ignore[union-attr]
    assert alike(before, state(copied))
    gone = weakref.ref(model), weakref.ref(loss)
    del model, precision, copied, loss
    gc.collect()
    assert [each() for each in gone] == [None, None]
