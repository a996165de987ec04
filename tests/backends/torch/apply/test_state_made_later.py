"""A skipped float16 step spoils no state that its first step makes, or that hooks keep."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoprec.backends.torch.train.model_state import restore_snapshot, take_snapshot
from tests.backends.torch.buffered import samples
from tests.backends.torch.operated import FLOAT16, adam, apply

pytestmark = pytest.mark.torch

MADE: dict[str, Any] = {}


class Making(nn.Module):
    """Makes the places of its averages in its first step, in a dict and in a global one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sums = nn.Linear(6, 3), defaultdict[str, float](float)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        mean = h.detach().float().mean(0)
        MADE["mean"] = 0.9 * MADE.get("mean", torch.zeros(3)) + mean
        MADE["number"] = 0.9 * MADE.get("number", 0.0) + float(mean.mean())
        self.sums["number"] += float(mean.mean())
        return h


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_skipped_step_leaves_nothing_infinite_in_places_that_it_made(at: int) -> None:
    MADE.clear()
    model = Making()
    precision = apply(FLOAT16, model, adam(model))
    for index, (inputs, targets) in enumerate(samples(7, overflowing=[at])):
        loss = nn.functional.cross_entropy(precision.forward(inputs), targets)
        assert precision.backward_and_step(loss) is (index != at)
    assert MADE["mean"].isfinite().all()
    assert math.isfinite(MADE["number"])
    assert math.isfinite(model.sums["number"])


SEEN = np.zeros(3)


class InNumpy(nn.Module):
    """Averages in NumPy's arrays: replaced, in place, in a list, and in a global variable."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.replaced, self.in_place, self.listed = np.zeros(3), np.zeros(3), [np.zeros(3)]

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        mean = h.detach().float().mean(0).numpy()
        self.replaced = 0.9 * self.replaced + mean
        self.in_place += mean
        self.listed[0] += mean
        SEEN[...] += mean
        return h

    def state(self) -> Any:
        return np.stack([self.replaced, self.in_place, self.listed[0]])


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_skipped_step_leaves_arrays_of_numpy_as_they_were(at: int) -> None:
    SEEN[...] = 0.0
    model = InNumpy()
    listed, in_place = model.listed, model.in_place
    precision = apply(FLOAT16, model, adam(model))
    for index, (inputs, targets) in enumerate(samples(7, overflowing=[at])):
        before = model.state()
        loss = nn.functional.cross_entropy(precision.forward(inputs), targets)
        assert not np.array_equal(model.state(), before)
        assert precision.backward_and_step(loss) is (index != at)
        assert np.array_equal(model.state(), before) is (index == at)
        assert np.isfinite(SEEN).all()
    assert (model.listed is listed, model.in_place is in_place) == (True, True)


def test_infinite_numbers_in_an_array_of_numpy_are_found_without_a_warning_of_its() -> None:
    SEEN[...] = 0.0
    model = InNumpy()
    with torch.no_grad():
        model.linear.weight.fill_(1.0)
    precision = apply(FLOAT16, model, adam(model))
    for inputs in (torch.ones(8, 6), torch.full((8, 6), 6e4)):
        loss = nn.functional.cross_entropy(precision.forward(inputs), torch.zeros(8).long())
        before = SEEN.copy()
        precision.backward_and_step(loss)
    assert np.isinf(before).all()
    assert np.isfinite(SEEN).all()


def test_a_snapshot_holds_arrays_of_numpy_and_none_of_them_is_shared() -> None:
    model = InNumpy()
    kept = take_snapshot(model)
    for _ in range(2):
        model(torch.ones(2, 6))
        assert model.state().any()
        restore_snapshot(model, kept)
        assert not model.state().any()


class Shown:
    """Averages what a layer is seen to give."""

    def __init__(self) -> None:
        self.average, self.number = torch.zeros(3), 0.0

    def __call__(self, module: nn.Module, args: Any, outputs: Tensor) -> None:
        self.average = 0.9 * self.average + outputs.detach().float().mean(0)
        self.number = 0.9 * self.number + outputs.abs().mean().item()

    def before(self, module: nn.Module, args: Any) -> None:
        self(module, args, args[0])


def closed_over(shown: Shown) -> Callable[..., None]:
    def hook(*seen: Any) -> None:
        shown(*seen)

    return hook


@pytest.mark.parametrize("applied_first", [True, False])
@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("how", ["object", "method", "closure"])
def test_a_skipped_step_leaves_nothing_infinite_in_what_hooks_see(
    how: str, at: int, applied_first: bool
) -> None:
    torch.manual_seed(0)
    model, shown = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3)), Shown()
    precision = apply(FLOAT16, model, adam(model)) if applied_first else None
    if how == "method":
        model[1].register_forward_pre_hook(shown.before)
    else:
        hook = shown if how == "object" else closed_over(shown)
        model[1].register_forward_hook(hook)
    precision = precision or apply(FLOAT16, model, adam(model))
    for index, (inputs, targets) in enumerate(samples(7, overflowing=[at])):
        loss = nn.functional.cross_entropy(precision.forward(inputs), targets)
        assert precision.backward_and_step(loss) is (index != at)
        assert shown.average.isfinite().all()
        assert math.isfinite(shown.number)


class Quantiser(nn.Module):
    """Moves the codes of a frozen table towards what it is given, in place or by new data."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.codes, self.in_place = nn.Linear(6, 3), nn.Embedding(4, 3), in_place
        self.codes.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        moved = 0.9 * self.codes.weight + 0.1 * h.detach().float().mean(0)
        if self.in_place:
            with torch.no_grad():
                self.codes.weight.copy_(moved)
        else:
            self.codes.weight.data = moved
        return h + self.codes(x[:, 0].long().clamp(0, 3))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_skipped_step_leaves_a_table_of_codes_as_it_was(at: int, in_place: bool) -> None:
    torch.manual_seed(0)
    model = Quantiser(in_place=in_place)
    precision = apply(FLOAT16, model, adam(model))
    for index, (inputs, targets) in enumerate(samples(7, overflowing=[at])):
        before = model.codes.weight.clone()
        loss = nn.functional.cross_entropy(precision.forward(inputs), targets)
        assert precision.backward_and_step(loss) is (index != at)
        assert torch.equal(model.codes.weight, before) is (index == at)
