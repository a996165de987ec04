"""A skipped float16 step leaves the model's buffers as they were; other steps are not touched."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec.backends.torch.apply import kept_buffers
from autoprec.backends.torch.apply.precision import Precision
from tests.backends.torch.operated import (
    BFLOAT16,
    FLOAT16,
    accumulating,
    adam,
    apply,
    float16,
    same,
)

pytestmark = pytest.mark.torch

FIXED = float16(mode="fixed", initial=256.0)
TOO_LARGE = 1e6  # finite in float32, infinite in float16
Batch = tuple[torch.Tensor, torch.Tensor]


class Averages(nn.Module):
    """Averages of its inputs, in all the ways in which modules keep such a thing."""

    in_place: torch.Tensor
    through_data: torch.Tensor
    replaced: torch.Tensor
    both: torch.Tensor
    last: torch.Tensor | None
    count: torch.Tensor
    started: torch.Tensor
    largest: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(size))
        self.register_buffer("through_data", torch.zeros(size), persistent=False)
        self.register_buffer("replaced", torch.zeros(size))
        self.register_buffer("both", torch.zeros(size))
        self.register_buffer("last", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("largest", torch.tensor(-torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen = x.detach().float().mean(0)
            self.in_place.lerp_(seen, 0.1)
            self.through_data.data.mul_(0.9).add_(seen)
            self.replaced = 0.9 * self.replaced + seen
            self.both.mul_(0.9)
            self.both = self.both + seen
            self.last = seen
            self.count += 1
            self.started.fill_(True)
            torch.maximum(self.largest, seen.max(), out=self.largest)
        return x


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def averages() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), Averages(8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)
    )


def spectral() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), Averages(8), nn.Linear(8, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutions,
    "averages": averages,
    "spectral": spectral,
}


def samples(count: int, overflowing: Sequence[int] = ()) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        inputs = torch.randn(8, 6, generator=generator)
        if index in overflowing:
            inputs[3] = TOO_LARGE
        found.append((inputs, torch.randint(3, (8,), generator=generator)))
    return found


def state(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        f"{path}.{name}": None if tensor is None else tensor.clone()
        for path, module in model.named_modules()
        for name, tensor in module._buffers.items()
    }


def unchanged(model: nn.Module, before: dict[str, torch.Tensor | None]) -> bool:
    now = state(model)
    return now.keys() == before.keys() and all(
        tensor is before[name] is None or (tensor is not None and torch.equal(tensor, before[name]))  # type: ignore[arg-type]
        for name, tensor in now.items()
    )


def finite(model: nn.Module) -> bool:
    return all(bool(b.isfinite().all()) for b in model.buffers() if not b.isneginf().all())


def step(precision: Precision, model: nn.Module, batch: Batch) -> bool:
    with precision.autocast():
        outputs = model(batch[0])
    precision.backward(nn.functional.cross_entropy(outputs, batch[1]))
    return precision.step()


def plain_amp(precision: Precision, call: Any, optimizer: Any, batch: Batch) -> None:
    """Take a step by the lines of torch's own documentation."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(call(batch[0]).float(), batch[1])
    precision.scaler.scale(loss).backward()
    precision.scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    precision.scaler.step(optimizer)
    precision.scaler.update()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("at", [0, 3])
def test_a_skipped_step_leaves_every_buffer_as_it_was(name: str, at: int) -> None:
    model = MODELS[name]()
    precision = apply(FLOAT16, model, adam(model))
    for index, batch in enumerate(samples(6, overflowing=[at])):
        before = state(model)
        assert step(precision, model, batch) is (index != at)
        assert unchanged(model, before) is (index == at)
    assert finite(model)
    model.eval()
    with torch.no_grad():
        assert bool(model(samples(1)[0][0]).isfinite().all())


@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on_as_if_the_skipped_batch_had_not_been_there(name: str) -> None:
    results = []
    for data in (samples(6, overflowing=[0, 3]), [samples(6)[i] for i in (1, 2, 4, 5)]):
        model = MODELS[name]()
        precision = apply(FIXED, model, adam(model))
        for batch in data:
            step(precision, model, batch)
        results.append([*model.parameters(), *model.buffers()])
    assert same(*results)


def test_every_micro_batch_of_a_skipped_update_is_undone() -> None:
    model = averages()
    precision = apply(accumulating(FLOAT16, 3), model, adam(model))
    data = samples(9, overflowing=[4])
    for batch in data[:3]:
        step(precision, model, batch)
    before = state(model)
    assert [step(precision, model, batch) for batch in data[3:6]] == [False] * 3
    assert precision.skipped == 1
    assert unchanged(model, before)
    assert [step(precision, model, batch) for batch in data[6:]] == [False, False, True]


def test_a_partial_accumulation_that_is_flushed_and_skipped_is_undone() -> None:
    model = averages()
    precision = apply(accumulating(FLOAT16, 3), model, adam(model))
    before = state(model)
    step(precision, model, samples(1, overflowing=[0])[0])
    assert not precision.flush()
    assert unchanged(model, before)


@pytest.mark.parametrize("name", MODELS)
def test_torchs_own_amp_lines_leave_the_buffers_too(name: str) -> None:
    model = MODELS[name]()
    optimizer = adam(model)
    precision = apply(FLOAT16, model, optimizer)
    for index, batch in enumerate(samples(5, overflowing=[0, 3])):
        before = state(model)
        plain_amp(precision, model, optimizer, batch)
        assert unchanged(model, before) is (index in (0, 3))
    assert precision.skipped == 2


def test_what_the_loop_does_to_buffers_between_steps_survives_a_skipped_one() -> None:
    for through_precision in (True, False):
        model = averages()
        optimizer = adam(model)
        precision = apply(FLOAT16, model, optimizer)
        loaded = {name: b + 1 for name, b in averages().state_dict().items()}
        model(samples(1)[0][0])  # a look at the outputs' shape
        model.load_state_dict(loaded | {"1.last": torch.ones(8)}, strict=False)
        before = state(model)
        for batch in samples(2, overflowing=[0, 1]):
            if through_precision:
                step(precision, model, batch)
            else:
                plain_amp(precision, model, optimizer, batch)
            assert unchanged(model, before)
            with torch.no_grad(), precision.autocast():
                model.eval()(batch[0])
                model.train()
            model.get_buffer("1.in_place").add_(1)
            before = state(model)


def test_forward_passes_that_nothing_of_ours_sees_leave_no_infinity() -> None:
    model = convolutions()
    optimizer = adam(model)
    precision = apply(FLOAT16, model, optimizer)

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        for part in model.children():
            x = part(x)
        return x

    plain_amp(precision, by_hand, optimizer, samples(1)[0])
    model.load_state_dict({name: b + 1 for name, b in model.state_dict().items()})
    before = state(model)
    plain_amp(precision, by_hand, optimizer, samples(1, overflowing=[0])[0])
    assert precision.skipped == 1
    assert finite(model)
    assert state(model)["2.num_batches_tracked"] == before["2.num_batches_tracked"] + 1  # type: ignore[operator]
    precision.scaler.load_state_dict({"scale": 1e30, **_growth(precision)})
    before = state(model)
    plain_amp(precision, by_hand, optimizer, samples(1)[0])  # overflows backward only
    assert precision.skipped == 2
    assert state(model)["2.running_mean"] is not None
    assert not unchanged(model, before)


def _growth(precision: Precision) -> dict[str, Any]:
    kept = precision.scaler.state_dict()
    return {name: value for name, value in kept.items() if name != "scale"}


def test_each_of_several_optimizers_leaves_the_buffers_when_it_is_skipped() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = convolutions(), averages()

    model = Pair()
    one, two = adam(model.first), adam(model.second)
    precision = apply(FLOAT16, model, one, two)

    def turn(part: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> bool:
        with precision.autocast():
            outputs = part(batch[0])
        loss = precision.compute_loss(nn.functional.cross_entropy, outputs, batch[1])
        precision.backward(loss, optimizer=optimizer)
        return precision.step(optimizer)

    good, bad = samples(2, overflowing=[1])
    for first, second in ((good, bad), (bad, good), (good, good)):
        for part, optimizer, batch in ((model.first, one, first), (model.second, two, second)):
            before = state(model)
            assert turn(part, optimizer, batch) is (batch is good)
            assert unchanged(model, before) is (batch is bad)


def test_one_update_of_two_optimizers_of_which_one_is_skipped_leaves_nothing_infinite() -> None:
    first, second = convolutions(), averages()
    model = nn.ModuleList([first, second])
    optimizers = adam(first), adam(second)
    precision = apply(FLOAT16, model, *optimizers)
    for batches in (samples(2, overflowing=[0]), samples(2, overflowing=[1])):
        for part, optimizer, batch in zip((first, second), optimizers, batches, strict=True):
            plain = precision.scaler
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(part(batch[0]).float(), batch[1])
            plain.scale(loss).backward()
            plain.step(optimizer)
        precision.scaler.update()
        assert finite(model)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert precision.skipped == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpoints_leave_the_buffers_too(reentrant: bool) -> None:
    model = averages()
    precision = apply(FLOAT16, model, adam(model))
    for index, (inputs, targets) in enumerate(samples(4, overflowing=[0, 2])):
        before = state(model)
        with precision.autocast():
            outputs = checkpoint(model, inputs.requires_grad_(), use_reentrant=reentrant)
        precision.backward(nn.functional.cross_entropy(outputs, targets))
        assert precision.step() is (index in (1, 3))
        assert unchanged(model, before) is (index in (0, 2))


@pytest.mark.parametrize("by_recipe", [True, False])
def test_compiled_models_leave_the_buffers_too(by_recipe: bool) -> None:
    model = convolutions()
    optimizer = adam(model)
    recipe = replace(FLOAT16, compile=by_recipe)
    precision = apply(recipe, model, optimizer, compile_backend="aot_eager")
    called: Any = model if by_recipe else torch.compile(model, backend="aot_eager", fullgraph=True)
    for index, batch in enumerate(samples(4, overflowing=[0, 2])):
        before = state(model)
        assert step(precision, called, batch) is (index in (1, 3))
        assert unchanged(model, before) is (index in (0, 2))


def test_a_fused_optimizer_leaves_the_buffers_too() -> None:
    model = averages()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    precision = apply(FLOAT16, model, optimizer)
    before = state(model)
    assert not step(precision, model, samples(1, overflowing=[0])[0])
    assert unchanged(model, before)


def test_training_without_overflow_is_the_same_bit_for_bit() -> None:
    results = []
    for kept in (True, False):
        model = averages()
        precision = apply(FLOAT16, model, adam(model))
        if not kept:
            precision.scaler.buffers = None
        for batch in samples(8):
            assert step(precision, model, batch)
        results.append([*model.parameters(), *model.buffers()])
    assert same(*results)


def test_nothing_waits_for_the_device_but_the_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = 0

    def counting(name: str) -> None:
        method = getattr(torch.Tensor, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal waits
            waits += 1
            return method(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)

    model = convolutions()
    precision = apply(FLOAT16, model, torch.optim.SGD(model.parameters()))
    data = samples(4, overflowing=[0, 2])
    for name in ("item", "__bool__", "__float__", "__int__", "cpu", "tolist", "numpy"):
        counting(name)
    for inputs, targets in data:
        loss = nn.functional.cross_entropy(precision.forward(inputs), targets)
        precision.scaler.scale(loss).backward()
        precision.scaler.step(precision.optimizers[0])
        precision.scaler.update()
        precision.optimizers[0].zero_grad()
    assert precision.skipped == 2
    assert waits == len(data)  # GradScaler's own


def test_large_buffers_are_held_twice_only_if_steps_change_them() -> None:
    class Queue(nn.Module):
        mask: torch.Tensor
        queue: torch.Tensor
        average: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(1024, 512))
            self.register_buffer("queue", torch.zeros(1024, 512))
            self.register_buffer("average", torch.zeros(1024, 512))
            self.linear = nn.Linear(6, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            with torch.no_grad():
                self.queue[: len(h)] = h
            logits: torch.Tensor = h @ self.queue.to(h.dtype).T + self.mask[:, 0]
            return logits

    model = Queue()
    precision = apply(FLOAT16, model, adam(model))
    assert precision.scaler.buffers is not None
    for index, batch in enumerate(samples(4, overflowing=[0, 2])):
        before = state(model)
        changed = step(precision, model, batch)
        assert unchanged(model, before) is (index in (0, 2)) is not changed
        model.average.lerp_(model.queue, 0.5)  # between steps, as an average of weights is
        held = [kept.name for kept in precision.scaler.buffers._large if kept.copy is not None]
        assert held == ["queue"]


def test_buffers_that_cannot_be_written_to_are_no_obstacle() -> None:
    model = convolutions()
    model.register_buffer("expanded", torch.zeros(1, 1).expand(4, 4))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with torch.inference_mode():
        model.register_buffer("inference", torch.ones(3))
    precision = apply(FLOAT16, model, adam(model))
    for batch in samples(3, overflowing=[1]):
        step(precision, model, batch)
    assert (precision.steps, precision.skipped) == (2, 1)


def test_a_model_moved_or_extended_after_the_profile_is_followed() -> None:
    model = averages()
    precision = apply(FLOAT16, model, adam(model))
    model.double().float()  # other tensors
    model.register_buffer("late", torch.zeros(3))
    before = state(model)
    step(precision, model, samples(1, overflowing=[0])[0])
    assert unchanged(model, before)


def test_restoring_and_applying_again_leave_nothing_behind() -> None:
    model = averages()
    optimizer = adam(model)
    first = apply(FLOAT16, model, optimizer)
    second = apply(FLOAT16, model, optimizer)
    first.restore()
    before = state(model)
    step(second, model, samples(1, overflowing=[0])[0])
    assert unchanged(model, before)
    second.restore()
    assert "forward" not in model.__dict__
    assert second.scaler.buffers is None
    assert model not in kept_buffers._KEPT
    precision = apply(BFLOAT16, model, optimizer)
    assert precision.scaler.buffers is None
    assert model not in kept_buffers._KEPT


def test_nothing_of_ours_keeps_a_model_alive_or_travels_with_its_copy() -> None:
    model = averages()
    precision = apply(FLOAT16, model, adam(model))
    step(precision, model, samples(1)[0])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = state(model)
        with precision.autocast():
            again(samples(1)[0][0])
        assert unchanged(model, before)
    assert copy.deepcopy(precision.scaler).buffers is None
    gone = weakref.ref(model)
    del model, precision, again
    gc.collect()
    assert gone() is None
