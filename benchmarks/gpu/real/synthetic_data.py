"""The size that the tasks here are built in, and their data: made, not downloaded, and learnable.

REAL_TASK_SIZE=tiny in the environment makes every task small enough for a CPU's second; without it
they are as published. Targets follow from inputs, so that a loss that falls, or that low precision
keeps from falling, says something. What is to be learned never changes; which samples a batch holds
is drawn from the framework's own random numbers, so a seed gives the same batches again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

SWITCH = "REAL_TASK_SIZE"
TINY = os.environ.get(SWITCH, "full") == "tiny"
if os.environ.get(SWITCH, "full") not in ("full", "tiny"):
    raise SystemExit(f"{SWITCH}={os.environ[SWITCH]!r} given, expected full or tiny")

Value = TypeVar("Value")
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]

#: The cells, in each direction, of what tells images apart.
CELLS = 8
#: Noise is made once and used again: new noise for every image would take longer than training.
NOISES = 16
#: The words that a text consists of, and how many of them may follow each.
WORDS, FOLLOWERS = 256, 4


def sized(full: Value, tiny: Value) -> Value:
    """Return the value for the size that was asked for."""
    return tiny if TINY else full


def images(batch_size: int, pixels: int, classes: int) -> Batches:
    """Yield images (batch, 3, pixels, pixels), each its class's coarse pattern in noise."""
    fixed = torch.Generator().manual_seed(0)
    patterns = torch.randn(classes, 3, CELLS, CELLS, generator=fixed)
    noise = torch.randn(NOISES, 3, pixels, pixels, generator=fixed)
    while True:
        labels = torch.randint(classes, (batch_size,))
        seen = nn.functional.interpolate(patterns[labels], size=(pixels, pixels))
        yield seen + noise[torch.randint(NOISES, (batch_size,))], labels


def masks(batch_size: int, pixels: int) -> Batches:
    """Yield noisy images (batch, 3, pixels, pixels) and what is bright in them, as 0 or 1."""
    noise = torch.randn(NOISES, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))
    while True:
        coarse = torch.randn(batch_size, 1, CELLS, CELLS)
        bright = (nn.functional.interpolate(coarse, (pixels, pixels), mode="bilinear") > 0).float()
        yield 2 * bright + noise[torch.randint(NOISES, (batch_size,))], bright


def vectors(batch_size: int, width: int, classes: int) -> Batches:
    """Yield vectors (batch, width), each its class's in noise."""
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(0))
    while True:
        labels = torch.randint(classes, (batch_size,))
        yield centres[labels] + torch.randn(batch_size, width), labels


def words(batch_size: int, length: int, vocabulary: int) -> Iterator[torch.Tensor]:
    """Yield texts (batch, length) of numbers below `vocabulary`; few words may follow each."""
    fixed = torch.Generator().manual_seed(0)
    used = torch.randperm(vocabulary, generator=fixed)[:WORDS]
    followers = torch.randint(len(used), (len(used), FOLLOWERS), generator=fixed)
    while True:
        choices = torch.randint(FOLLOWERS, (length, batch_size))
        places = [torch.randint(len(used), (batch_size,))]
        for choice in choices[1:]:
            places.append(followers[places[-1], choice])
        yield used[torch.stack(places, dim=1)]
