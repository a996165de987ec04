"""The classic model of the mixed-precision guides: 784-4096-4096-10, on MNIST-sized digits.

scikit-learn's 8 x 8 digits are enlarged to 28 x 28 and repeated as an endless stream, so that any
batch size can be had. There is no BATCH_SIZE: the tuner may choose it.

    autoprec tune examples/torch/guide_mlp.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1797 images as rows of 784 values in 0..1, and their classes."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32)
    images = images.repeat_interleave(3, dim=1).repeat_interleave(3, dim=2)  # 8 x 8 to 24 x 24
    images = nn.functional.pad(images, (2, 2, 2, 2))  # to 28 x 28
    return images.flatten(1), torch.tensor(digits.target, dtype=torch.int64)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 10),
    )


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless batches drawn from the images, always the same ones in the same order."""
    images, classes = load_images()
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(len(images), (batch_size,), generator=generator)
        yield images[chosen], classes[chosen]


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-4)
