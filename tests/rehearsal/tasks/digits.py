"""scikit-learn's digits, as the tasks of the rehearsal want them: real data, small and quick."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits


def batches(batch_size: int, *shape: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield shuffled images of this shape, about one in size, with their classes."""
    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32).div(8).sub(1).reshape(-1, *shape)
    classes = torch.tensor(found.target)
    while True:
        order = torch.randperm(len(classes))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield images[chosen], classes[chosen]
