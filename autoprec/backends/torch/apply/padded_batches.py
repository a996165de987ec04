"""Batches and sequences padded to the device's alignment, with masks that say what is real.

Aligned sizes keep matrix products fast, and a last batch of full size keeps a compiled model from
compiling again. Padding a batch is the loader's business and the loss must leave the added samples
out: `masked_mean` does.

    loader = DataLoader(texts, precision.batch_size, collate_fn=Collate(multiple=8, sequences=True))
    for batch in loader:
        outputs = model(batch.inputs, batch.mask)
        loss = masked_mean(cross_entropy(outputs, batch.targets, reduction="none"), batch.samples)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from autoprec.backends.torch.apply.nested_tensors import map_tensors
from autoprec.backends.torch.apply.padding import round_up
from autoprec.errors import UsageError


@dataclass(frozen=True)
class PaddedBatch:
    """A batch with what was added to it marked.

    `samples` is a bool tensor of shape (batch,): True for real samples. `mask`, where the inputs
    are sequences, is (batch, length): True for real positions (of real samples). Iterating yields
    `inputs, targets`.
    """

    inputs: Any
    targets: Any
    samples: Tensor
    mask: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.inputs, self.targets))


def pad_batch(
    inputs: Any, targets: Any = None, *, multiple: int = 8, size: int | None = None
) -> PaddedBatch:
    """Pad the leading dimension of every tensor to `multiple`, or to exactly `size` samples.

    The added samples repeat the last real one: zeros would be an unlikely input, and could turn a
    normalisation into NaN. BatchNorm still sees them; where that matters, drop the last batch
    instead. Scalars and tensors of another leading length pass through.
    """
    count = _leading(inputs)
    wanted = round_up(count, multiple) if size is None else size
    if wanted < count:
        raise UsageError(f"pad_batch: {count} samples given, expected at most size={size}")
    samples = torch.arange(wanted, device=_device(inputs)) < count

    def grow(tensor: Tensor) -> Tensor:
        if wanted == count or tensor.dim() == 0 or tensor.shape[0] != count:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(wanted - count, *tensor.shape[1:])])

    return PaddedBatch(map_tensors(grow, inputs), map_tensors(grow, targets), samples)


def pad_sequences(
    sequences: Sequence[Tensor],
    *,
    multiple: int = 8,
    length: int | None = None,
    value: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Stack sequences of different lengths, padded at the end; return them and their mask.

    Each is (length, ...) with equal trailing shapes. The padded length is the longest one's next
    multiple, or exactly `length`. The mask is (batch, length), True where the sequence is real:
    the opposite of nn.MultiheadAttention's `key_padding_mask`.
    """
    if not sequences:
        raise UsageError("pad_sequences: no sequence given, expected at least one")
    lengths = torch.tensor([len(s) for s in sequences], device=sequences[0].device)
    longest = int(lengths.max())
    wanted = round_up(longest, multiple) if length is None else length
    if wanted < longest:
        raise UsageError(
            f"pad_sequences: a sequence of {longest} given, expected at most length={length}"
        )
    first = sequences[0]
    padded = first.new_full((len(sequences), wanted, *first.shape[1:]), value)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    mask = torch.arange(wanted, device=first.device) < lengths.unsqueeze(1)
    return padded, mask


@dataclass(frozen=True)
class Collate:
    """A DataLoader's `collate_fn` that pads sequences and the batch to a multiple.

    Samples are (input, target) pairs. With `sequences`, inputs are tensors whose first dimension
    differs and are padded with `value`; with `target_sequences`, targets are too, with
    `target_value` (cross_entropy ignores -100). Everything else is collated as torch does. `size`
    and `length` pad to exactly that many samples and positions. It is an object of a module-level
    class, so that it travels to a loader's worker processes.
    """

    multiple: int = 8
    sequences: bool = False
    target_sequences: bool = False
    value: float = 0.0
    target_value: float = -100.0
    size: int | None = None
    length: int | None = None

    def __call__(self, samples: Sequence[tuple[Any, Any]]) -> PaddedBatch:
        """Collate a list of (input, target) pairs."""
        first, second = (list(part) for part in zip(*samples, strict=True))
        inputs, mask = self._join(first, self.value) if self.sequences else (None, None)
        targets = self._join(second, self.target_value)[0] if self.target_sequences else None
        batch = pad_batch(
            default_collate(first) if inputs is None else inputs,
            default_collate(second) if targets is None else targets,
            multiple=self.multiple,
            size=self.size,
        )
        if mask is None:
            return batch
        added = mask.new_zeros(len(batch.samples) - len(mask), mask.shape[1])
        return PaddedBatch(batch.inputs, batch.targets, batch.samples, torch.cat([mask, added]))

    def _join(self, sequences: list[Tensor], value: float) -> tuple[Tensor, Tensor]:
        return pad_sequences(sequences, multiple=self.multiple, length=self.length, value=value)


def masked_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """Average `losses` where `mask` is True; its shape is the leading part of theirs.

    A batch padded with this loss trains exactly as the unpadded one. What is masked out may be
    inf or NaN. With nothing marked as real the mean is 0.
    """
    if losses.shape[: mask.dim()] != mask.shape:
        raise UsageError(
            f"masked_mean: losses of shape {tuple(losses.shape)} given, expected "
            f"{tuple(mask.shape)} in front, as the mask has; use reduction='none'"
        )
    trailing = losses.shape[mask.dim() :]
    real = mask.reshape(*mask.shape, *(1,) * len(trailing))
    total = torch.where(real, losses, losses.new_zeros(())).sum()
    return total / (mask.sum().clamp(min=1) * math.prod(trailing))


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, value)
    return found


def _leading(inputs: Any) -> int:
    """Count samples by the first tensor's leading dimension."""
    tensors = [tensor for tensor in _tensors(inputs) if tensor.dim() > 0]
    if not tensors or tensors[0].shape[0] == 0:
        raise UsageError("pad_batch: no tensor with samples given, expected at least one")
    return int(tensors[0].shape[0])


def _device(inputs: Any) -> torch.device:
    return _tensors(inputs)[0].device
