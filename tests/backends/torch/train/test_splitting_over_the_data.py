"""A first batch that may be split says nothing of the others: losses count what differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset

from tests.backends.torch.described import facts

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("unhurried")]

WORDS = 50


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words))


def lengths(batch_size: int, step: int, ragged_from: int) -> torch.Tensor:
    whole = torch.full((batch_size, 1), 12)
    return torch.randint(2, 13, (batch_size, 1)) if step >= ragged_from else whole


def texts(batch_size: int, ragged_from: int = 4, count: int = 40) -> Iterator[Any]:
    for step in range(count):
        words = torch.randint(1, WORDS, (batch_size, 12))
        outside = torch.arange(12) >= lengths(batch_size, step, ragged_from)
        yield words, words.roll(1, 1).masked_fill(outside, -100)


def words_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


def refused(**task: Any) -> str:
    found = facts(8, **task)
    assert not found.splittable
    assert "those of the first batch agree" in found.split_reason
    return found.split_reason


def test_words_that_count_from_the_fifth_batch_on_are_found() -> None:
    reason = refused(build_model=Tagger, build_data=texts, loss_fn=words_loss)
    assert "in batch " in reason
    assert "differ from the whole batch's by " in reason


def test_the_same_texts_are_split_where_all_are_full() -> None:
    found = facts(
        8, build_model=Tagger, build_data=lambda n: texts(n, ragged_from=99), loss_fn=words_loss
    )
    assert (found.splittable, found.split_reason) == (True, "")


def test_a_sum_over_samples_of_ragged_texts_may_be_split() -> None:
    def by_sample(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(
            outputs.transpose(1, 2), targets, ignore_index=-100, reduction="none"
        )
        return each.sum(1).mean()

    assert facts(8, build_model=Tagger, build_data=texts, loss_fn=by_sample).splittable


def test_one_ragged_batch_of_many_is_enough() -> None:
    """Its halves are unlike, so that it is among those that are compared."""

    def data(batch_size: int) -> Iterator[Any]:
        for step in range(60):
            yield next(texts(batch_size, ragged_from=0 if step == 37 else 99))

    assert "in batch 37" in refused(build_model=Tagger, build_data=data, loss_fn=words_loss)


class Texts(Dataset):
    """Texts of a map-style set, sorted by what is valid in them: the whole ones come first."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        words = torch.arange(1, 13) + index % 30
        valid = 12 if index < 80 else 2 + index % 11
        return words, words.masked_fill(torch.arange(12) >= valid, -100)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_and_without_workers_is_looked_through(workers: int) -> None:
    refused(
        build_model=Tagger,
        build_data=lambda n: DataLoader(Texts(), batch_size=n, num_workers=workers),
        loss_fn=words_loss,
    )


def test_weights_of_classes_that_are_balanced_at_first_are_found() -> None:
    def data(batch_size: int) -> Iterator[Any]:
        for step in range(30):
            balanced = torch.arange(batch_size) % 2
            labels = balanced if step < 3 else torch.randint(2, (batch_size,))
            yield torch.randn(batch_size, 4), labels

    def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, torch.tensor([1.0, 20.0]))

    refused(build_model=lambda: nn.Linear(4, 2), build_data=data, loss_fn=weighted)


def test_objects_in_lists_are_counted() -> None:
    """As detectors do: a list of images' objects, and a loss over the number of all of them."""

    def data(batch_size: int) -> list[Any]:
        def objects(step: int, image: int) -> dict[str, torch.Tensor]:
            return {"boxes": torch.randn(2 if step < 5 else 1 + image % 5 * step, 4)}

        return [
            (torch.randn(batch_size, 6), [objects(step, image) for image in range(batch_size)])
            for step in range(12)
        ]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        images, targets = batch
        found = model(images)
        errors = [(box - t["boxes"]).abs().sum() for box, t in zip(found, targets, strict=True)]
        return torch.stack(errors).sum() / sum(len(t["boxes"]) for t in targets)

    refused(build_model=lambda: nn.Linear(6, 4), build_data=data, training_step=step)


def test_packed_texts_are_cut_and_counted() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 1)

        def forward(self, given: Any) -> torch.Tensor:
            return self.head(self.cells(given)[0].data)

    def data(batch_size: int) -> Iterator[Any]:
        for step in range(12):
            sizes = [6 if step < 4 else 1 + (3 * k + step) % 9 for k in range(batch_size)]
            yield pack_sequence([torch.randn(n, 3) for n in sizes], enforce_sorted=False)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        padded, _ = pad_packed_sequence(batch)
        assert len(padded)
        return model(batch).square().mean()  # over the words of all texts

    refused(build_model=Reader, build_data=data, training_step=step)


def test_words_masked_at_random_with_the_data_are_found() -> None:
    def data(batch_size: int) -> Iterator[Any]:
        for step in range(20):
            words = torch.randint(2, WORDS, (batch_size, 12))
            chosen = torch.zeros(batch_size, 12, dtype=torch.bool)
            chosen[:, :2] = True
            if step >= 2:
                chosen = torch.rand(batch_size, 12) < 0.15
                chosen[:, 0] = True
            yield {"words": words.masked_fill(chosen, 1), "labels": words, "chosen": chosen}

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        chosen = batch["chosen"]
        return F.cross_entropy(model(batch["words"])[chosen], batch["labels"][chosen])

    refused(build_model=Tagger, build_data=data, training_step=step)


def test_a_half_without_anything_to_count_is_found() -> None:
    def data(batch_size: int) -> Iterator[Any]:
        for step in range(10):
            inputs, targets = next(texts(batch_size, ragged_from=99))
            if step == 7:
                targets[: batch_size // 2] = -100
            yield inputs, targets

    reason = refused(build_model=Tagger, build_data=data, loss_fn=words_loss)
    assert "by 0.5 in batch 7" in reason


def test_a_half_without_anything_to_divide_by_is_found() -> None:
    def by_count(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(
            outputs.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none"
        )
        valid = (targets.flatten() >= 0).float()
        return (each * valid).sum() / valid.sum()

    def data(batch_size: int) -> Iterator[Any]:
        for step in range(10):
            inputs, targets = next(texts(batch_size, ragged_from=99))
            if step == 7:
                targets[: batch_size // 2] = -100
            yield inputs, targets

    found = facts(8, build_model=Tagger, build_data=data, loss_fn=by_count)
    assert found.split_reason.endswith("not finite, in batch 7")


def test_a_buffer_that_the_loader_fills_anew_is_as_good_as_new_tensors() -> None:
    def data(batch_size: int) -> Iterator[Any]:
        words, targets = torch.empty(2, batch_size, 12, dtype=torch.long)
        for given, wanted in texts(batch_size):
            words.copy_(given)
            targets.copy_(wanted)
            yield words, targets

    refused(build_model=Tagger, build_data=data, loss_fn=words_loss)


def test_short_and_odd_batches_among_the_others_are_no_reason() -> None:
    def data(batch_size: int) -> Iterator[Any]:
        for step in range(20):
            count = batch_size if step % 3 else batch_size - 1 - step % 2
            yield (
                torch.randn(count if step else batch_size, 4),
                torch.randn(count if step else batch_size, 1),
            )

    assert facts(8, build_data=data).splittable


RARE = 77


def rows(batch_size: int, what: str) -> Iterator[Any]:
    """Noise, with targets that are alike in all batches but one."""
    for step in range(200):
        rare = step == RARE
        targets: torch.Tensor = torch.ones(batch_size, 3)
        if what == "a mask":
            targets = targets.bool()
            targets[:3] = not rare
        elif what == "a class":
            targets = torch.arange(batch_size) % 2
            targets[0] = 2 if rare else 0
        elif what == "a gap":
            targets = torch.randn(batch_size, 3)
            targets[: batch_size // 2 * rare] = torch.nan
        elif what == "a peak":
            targets = torch.randn(batch_size, 300)
            targets[0, 0] += 30.0 * rare
        elif rare:
            targets[: batch_size // 2] = 3.0
        yield torch.randn(batch_size, 4), targets


@pytest.mark.parametrize("what", ["a class", "a gap", "a weight", "a mask", "a peak"])
def test_one_batch_with_rare_targets_is_found_among_inputs_of_noise(what: str) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if what == "a class":
            return F.cross_entropy(outputs, targets, torch.tensor([1.0, 1.0, 50.0]))
        if what == "a gap":
            errors = (outputs - targets.nan_to_num())[~targets.isnan()]
            return errors.abs().sum() / len(errors)
        if what == "a peak":
            scaled = targets / targets.abs().max().clamp(min=8.0)
            return (outputs.mean(1, keepdim=True) - scaled).abs().mean()
        return (targets * outputs.square()).sum() / targets.sum()

    reason = refused(
        build_model=lambda: nn.Linear(4, 3), build_data=lambda n: rows(n, what), loss_fn=loss
    )
    assert f"in batch {RARE}" in reason
