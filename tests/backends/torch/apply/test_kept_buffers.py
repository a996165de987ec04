"""A skipped float16 step leaves the model's buffers as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.backends.torch.buffered import (
    MODELS,
    Batch,
    averages,
    convolutions,
    finite,
    plain_amp,
    samples,
    state,
    step,
    unchanged,
)
from tests.backends.torch.operated import FLOAT16, accumulating, adam, apply, float16, same

pytestmark = pytest.mark.torch

FIXED = float16(mode="fixed", initial=256.0)


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


class Registering(nn.Module):
    """Registers its average in its first forward pass."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x)
        if not hasattr(self, "average"):
            self.register_buffer("average", torch.zeros(3))
        self.average.lerp_(made.detach().float().mean(0), 0.5)
        return made


class Flagged(Registering):
    """Remembers by a flag that it did so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_built = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x)
        if not self.is_built:
            self.register_buffer("average", torch.zeros(3))
            self.is_built = True
        self.average.lerp_(made.detach().float().mean(0), 0.5)
        return made


@pytest.mark.parametrize("kind", [Registering, Flagged])
def test_buffers_that_a_skipped_first_step_makes_are_made_anew(kind: type[Registering]) -> None:
    results = []
    for data in (samples(4, overflowing=[0, 2]), [samples(4)[i] for i in (1, 3)]):
        torch.manual_seed(0)
        model = kind()
        precision = apply(FIXED, model, adam(model))
        for batch in data:
            step(precision, model, batch)
        results.append([*model.buffers()])
    assert same(*results)


@pytest.mark.parametrize("skipped", [[0, 1], [2], [0, 3]])
def test_what_the_first_pass_gives_its_shape_begins_anew(skipped: list[int]) -> None:
    """Statistics of modules that learn how many features there are from their first batch."""
    results = []
    for data in (samples(5, skipped), [b for i, b in enumerate(samples(5)) if i not in skipped]):
        torch.manual_seed(0)
        norm = nn.LazyBatchNorm1d(affine=False)
        model = nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3))
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
    before = state(model)
    precision.scaler.update(1e30)  # what overflows now is the backward pass only
    plain_amp(precision, by_hand, optimizer, samples(1)[0])
    assert precision.skipped == 2
    assert finite(model)
    assert not unchanged(model, before)


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


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_modules_leave_the_buffers_too() -> None:
    scripted: Any = torch.jit.script(nn.BatchNorm1d(8))  # type: ignore[no-untyped-call]
    model = nn.Sequential(nn.Linear(6, 8), scripted, nn.Linear(8, 3))
    precision = apply(FLOAT16, model, adam(model))
    for index, batch in enumerate(samples(4, overflowing=[0, 2])):
        before = {name: buffer.clone() for name, buffer in scripted.named_buffers()}
        assert step(precision, model, batch) is (index in (1, 3))
        equal = [torch.equal(buffer, before[name]) for name, buffer in scripted.named_buffers()]
        assert equal == [index in (0, 2)] * 3


def test_a_fused_optimizer_leaves_the_buffers_too() -> None:
    model = averages()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    precision = apply(FLOAT16, model, optimizer)
    before = state(model)
    assert not step(precision, model, samples(1, overflowing=[0])[0])
    assert unchanged(model, before)


@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_models_with_profiles_of_their_own_that_share_a_step_stay_finite(first: str) -> None:
    """The step of one overflows in the other, which it calls, and which is not skipped itself."""
    generator, discriminator, alone = convolutions(), averages(), averages()
    generator.append(nn.Linear(3, 6))
    precisions = {
        name: apply(FLOAT16, model, adam(model))
        for name, model in {"generator": generator, "discriminator": discriminator}.items()
    }
    elsewhere = apply(FLOAT16, alone, adam(alone))
    good, bad = samples(2, overflowing=[1])

    def turn(name: str, batch: Batch) -> bool:
        precision = precisions[name]
        with precisions["generator"].autocast():
            fake = generator(batch[0])
        with precision.autocast():
            outputs = discriminator(fake)
        precision.backward(nn.functional.cross_entropy(outputs, batch[1]))
        return precision.step()

    with elsewhere.autocast():
        alone(good[0])
    other = state(alone)
    for batch in (good, bad, good, bad):
        for name in sorted(precisions, key=lambda each: each != first):
            assert turn(name, batch) is (batch is good)
            assert finite(generator)
            assert finite(discriminator)
            generator.zero_grad()
            discriminator.zero_grad()
    assert unchanged(alone, other)
