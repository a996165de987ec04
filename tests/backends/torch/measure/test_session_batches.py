"""What a session trains on where batches differ in shape: the largest once, then a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autoprec.backends import registry
from autoprec.backends.protocol import Task
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from tests.backends.torch.described import facts

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("unhurried")]

QUICK = TimingBudget(seconds=0.2, min_steps=3, max_steps=8)


def model() -> nn.Module:
    return nn.Linear(1, 4)


class Recorded:
    """A training step that notes the lengths it was given."""

    def __init__(self, length: Callable[[Any], Any] = lambda batch: batch.shape[1]) -> None:
        self.lengths: list[Any] = []
        self._length = length

    def __call__(self, net: nn.Module, batch: Any) -> torch.Tensor:
        self.lengths.append(self._length(batch))
        tensors = batch if isinstance(batch, list) else [batch]
        return torch.stack([net(t.flatten(1).unsqueeze(-1)).square().mean() for t in tensors]).sum()


def measure(
    data: Callable[[int], Iterable[Any]], step: Any, recipe: Recipe, surveyed: int | None = None
) -> Measurement:
    known = {} if surveyed is None else {"surveyed": surveyed}
    task = Task("task.py", model, data, training_step=step, **known)
    session = registry.load("torch").open(
        task, recipe, device="cpu", seed=0, report=lambda *_: None
    )
    try:
        return session.time_steps(QUICK)
    finally:
        session.close()


def sorted_texts(batch_size: int) -> Iterator[torch.Tensor]:
    for step in range(120):
        yield torch.randn(batch_size, 8 if step < 60 else 32 + step % 2)


def test_the_largest_comes_first_and_then_what_stands_for_all() -> None:
    step = Recorded()
    measured = measure(sorted_texts, step, Recipe(batch_size=4))
    assert step.lengths[0] == 33
    assert step.lengths[1:5] == step.lengths[5:9]
    assert 8 in step.lengths[1:5]
    assert max(step.lengths[1:5]) >= 32
    assert measured.samples_per_step == 4
    assert len(step.lengths) == measured.steps + measured.warmup_steps
    assert (len(step.lengths) - 1) % 4 == 0


def test_every_recipe_is_given_the_same_batches() -> None:
    seen = []
    for recipe in (Recipe(batch_size=4), Recipe(batch_size=4, memory_format="channels_last")):
        step = Recorded(lambda batch: (batch.shape[1], float(batch.sum())))
        measure(sorted_texts, step, recipe)
        seen.append(step.lengths[:9])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("accumulation_steps", [2, 3, 8])
def test_every_batch_has_its_turn_where_updates_take_several(accumulation_steps: int) -> None:
    step = Recorded()
    recipe = Recipe(batch_size=4, accumulation_steps=accumulation_steps)
    measured = measure(sorted_texts, step, recipe)
    assert measured.samples_per_step == 4 * accumulation_steps
    updates = measured.steps + measured.warmup_steps
    assert len(step.lengths) == accumulation_steps * updates
    timed = step.lengths[1:]
    assert all(timed[i] == timed[i % 4] for i in range(len(timed)))


def test_batches_of_one_shape_are_the_first_ones_as_ever() -> None:
    def data(batch_size: int) -> Iterator[torch.Tensor]:
        for number in range(100):
            yield torch.full((batch_size, 3), float(number))

    step = Recorded(lambda batch: int(batch[0, 0]))
    measured = measure(data, step, Recipe(batch_size=4))
    assert step.lengths == [n % 4 for n in range(len(step.lengths))]
    assert measured.warmup_steps < len(step.lengths)


def test_where_shapes_are_known_to_be_the_same_no_more_is_drawn() -> None:
    drawn = []

    def data(batch_size: int) -> Iterator[torch.Tensor]:
        for number in range(100):
            drawn.append(number)
            yield torch.randn(batch_size, 3)

    measure(data, Recorded(), Recipe(batch_size=4), surveyed=0)
    assert max(drawn) < 60, "for the loader's time; a survey looks at 128"


def test_as_many_batches_are_looked_at_as_the_description_did() -> None:
    found = facts(4, build_model=model, build_data=sorted_texts, training_step=Recorded())
    assert found.surveyed == 120
    step = Recorded()
    measure(sorted_texts, step, Recipe(batch_size=4), surveyed=70)
    assert step.lengths[0] == 33
    assert sorted(step.lengths[1:5])[:3] == [8, 8, 8]


def test_memory_is_the_largest_batchs() -> None:
    def data(long: int) -> Callable[[int], Iterator[torch.Tensor]]:
        return lambda n: (torch.randn(n, long if step == 70 else 8) for step in range(90))

    recipe = Recipe(batch_size=32)
    short = measure(data(8), Recorded(), recipe).peak_memory_bytes
    mixed = measure(data(200_000), Recorded(), recipe).peak_memory_bytes
    activations = 32 * 200_000 * 4 * 4
    assert mixed - short > activations


def images(batch_size: int) -> Iterator[list[torch.Tensor]]:
    """As detectors take them: a list of images, each of its own size."""
    for step in range(30):
        yield [torch.randn(3, 4, 5 + (step * k) % 11) for k in range(batch_size)]


def test_lists_of_images_of_any_size_are_timed_in_turn_and_said() -> None:
    step = Recorded(lambda batch: tuple(image.shape[2] for image in batch))
    measured = measure(images, step, Recipe(batch_size=4))
    assert measured.samples_per_step == 4
    assert len(set(step.lengths)) > 2
    found = facts(4, build_model=model, build_data=images, training_step=step)
    (warning,) = found.warnings
    assert "in dimension 2 of batch[*], in all 30 batches" in warning


def test_a_loader_that_pads_each_batch_is_described_and_measured() -> None:
    texts = [torch.randn(2 + index // 4) for index in range(128)]

    def pad(batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(batch, batch_first=True)

    def data(batch_size: int) -> Any:
        return DataLoader(texts, batch_size=batch_size, collate_fn=pad, num_workers=2)

    step = Recorded()
    measure(data, step, Recipe(batch_size=8))
    assert step.lengths[0] == 33
    found = facts(8, build_model=model, build_data=data, training_step=step)
    assert "batches differ in shape: 3 to 33 in dimension 1 of batch" in found.warnings[0]
    assert found.most_saved_bytes_per_sample > 1.5 * found.saved_bytes_per_sample > 0.0


def test_operations_are_counted_on_a_batch_of_middling_size() -> None:
    def data(batch_size: int) -> Iterator[Any]:
        for step in range(40):
            length = 4 if step < 15 else 60
            yield torch.randn(batch_size, length, 4), torch.randn(batch_size, length, 1)

    given = {"build_data": data, "build_model": lambda: nn.Linear(4, 1)}
    whole = facts(8, **given).flops_per_sample
    head = facts(
        8, **given | {"build_data": lambda n: [(torch.randn(n, 4, 4), torch.randn(n, 4, 1))]}
    )
    assert head.flops_per_sample is not None
    assert whole is not None
    assert whole > 3 * head.flops_per_sample
    assert head.most_saved_bytes_per_sample == 0


def test_a_later_batch_that_breaks_the_model_does_not_end_the_description() -> None:
    """It would end the training: nobody has said that it comes."""

    def data(batch_size: int) -> Iterator[Any]:
        for step in range(12):
            yield torch.randn(batch_size, 4 if step < 11 else 5), torch.randn(batch_size, 1)

    found = facts(8, build_data=data)
    assert not found.splittable
    assert found.split_reason.endswith(", in batch 11")


def test_the_description_names_inputs_and_targets() -> None:
    def data(batch_size: int) -> Iterator[Any]:
        for step in range(12):
            yield {"ids": torch.randn(batch_size, 4 + step)}, torch.randn(batch_size, 1)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, given: Any) -> torch.Tensor:
            return self.linear(given["ids"].mean(1, keepdim=True))

    found = facts(8, build_data=data, build_model=Mean)
    assert "4 to 15 in dimension 1 of the inputs['ids']" in found.warnings[0]
    assert found.splittable


def test_recipes_are_measured_alike_with_and_without_a_description() -> None:
    seen = []
    for surveyed in (None, 120):
        step = Recorded()
        measure(sorted_texts, step, replace(Recipe(), batch_size=4), surveyed)
        seen.append(step.lengths[:5])
    assert seen[0] == seen[1]
