"""Padded batches and sequences: aligned sizes, honest masks, the same training."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from autoprec.backends.torch.apply.padded_batches import (
    Collate,
    masked_mean,
    pad_batch,
    pad_sequences,
)
from autoprec.errors import UsageError

pytestmark = pytest.mark.torch


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 16))
def test_a_batch_is_padded_to_the_next_multiple_and_marked(count: int, multiple: int) -> None:
    inputs = {"x": torch.randn(count, 3), "scale": torch.tensor(2.0), "name": "kept"}
    batch = pad_batch(inputs, torch.arange(count), multiple=multiple)
    assert len(batch.samples) % multiple == 0
    assert len(batch.samples) - count < multiple
    assert batch.samples.sum() == count
    assert batch.samples[:count].all()
    assert torch.equal(batch.inputs["x"][:count], inputs["x"])
    assert batch.inputs["x"].shape == (len(batch.samples), 3)
    assert batch.inputs["scale"] is inputs["scale"]
    assert batch.inputs["name"] == "kept"
    assert torch.equal(batch.targets[:count], torch.arange(count))


def test_the_added_samples_repeat_the_last_one() -> None:
    batch = pad_batch(torch.tensor([[1.0], [2.0]]), size=4)
    assert batch.inputs.flatten().tolist() == [1.0, 2.0, 2.0, 2.0]
    assert batch.targets is None


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9))
def test_training_on_a_padded_batch_gives_the_same_gradient(count: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    inputs, targets = torch.randn(count, 3), torch.randint(0, 4, (count,))
    cross_entropy(model(inputs), targets).backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    batch = pad_batch(inputs, targets)
    losses = cross_entropy(model(batch.inputs), batch.targets, reduction="none")
    masked_mean(losses, batch.samples).backward()
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(1, 8))
def test_sequences_are_padded_at_the_end(lengths: list[int], multiple: int) -> None:
    sequences = [torch.full((n, 2), float(n + 1)) for n in lengths]
    padded, mask = pad_sequences(sequences, multiple=multiple, value=-7.0)
    assert padded.shape[1] % multiple == 0
    assert mask.sum(1).tolist() == lengths
    for row, real, sequence in zip(padded, mask, sequences, strict=True):
        assert torch.equal(row[real], sequence)
        assert (row[~real] == -7.0).all()


def test_an_exact_size_and_length_keep_shapes_constant() -> None:
    collate = Collate(sequences=True, size=5, length=6)
    for count in (2, 5):
        batch = collate([(torch.arange(n + 1), n) for n in range(count)])
        assert batch.inputs.shape == (5, 6)
        assert batch.mask.shape == (5, 6)
        assert batch.samples.tolist() == [True] * count + [False] * (5 - count)
        assert not batch.mask[count:].any()


def test_the_mask_hides_padding_from_attention() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    sequence = torch.randn(3, 8)
    batch = Collate(sequences=True)([(sequence, 0), (torch.randn(5, 8), 1)])
    output = layer(batch.inputs[:2], src_key_padding_mask=~batch.mask[:2])
    torch.testing.assert_close(output[0, :3], layer(sequence.unsqueeze(0))[0])


def test_target_sequences_are_ignored_by_cross_entropy_where_padded() -> None:
    batch = Collate(sequences=True, target_sequences=True)(
        [(torch.tensor([1, 2]), torch.tensor([2, 3])), (torch.tensor([4]), torch.tensor([5]))]
    )
    assert batch.targets.shape == (8, 8)
    assert batch.targets[1].tolist() == [5] + [-100] * 7
    inputs, targets = batch
    assert inputs.shape == targets.shape


def test_it_serves_a_loaders_workers() -> None:
    collate = Collate(multiple=4)
    assert pickle.loads(pickle.dumps(collate)) == collate
    data = [(torch.ones(2), i) for i in range(6)]
    loader = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate, num_workers=1)
    assert [batch.samples.tolist() for batch in loader] == [[True] * 4, [True, True, False, False]]


def test_masked_values_may_be_anything() -> None:
    losses = torch.tensor([[1.0, 3.0], [float("nan"), float("inf")]])
    assert masked_mean(losses, torch.tensor([True, False])).item() == 2.0
    assert masked_mean(losses[:1], torch.tensor([False])).item() == 0.0
    assert masked_mean(losses, torch.tensor([[True, False], [False, False]])).item() == 1.0


def test_mistakes_are_named() -> None:
    with pytest.raises(UsageError, match="3 samples given, expected at most size=2"):
        pad_batch(torch.ones(3, 1), size=2)
    with pytest.raises(UsageError, match="no tensor with samples"):
        pad_batch({"name": "nothing"})
    with pytest.raises(UsageError, match="sequence of 4 given"):
        pad_sequences([torch.ones(4)], length=2)
    with pytest.raises(UsageError, match="no sequence given"):
        pad_sequences([])
    with pytest.raises(UsageError, match="reduction='none'"):
        masked_mean(torch.tensor(1.0), torch.tensor([True]))
