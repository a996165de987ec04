"""scikit-learn's digits, as the tasks of the rehearsal want them: real data, small and quick.

They are read from its file: importing scikit-learn takes longer than most of these tasks train, in
each of a tuning's processes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

# Each row: 64 pixels of 0 to 16, then the class.
_ROWS = np.loadtxt(
    Path(importlib.util.find_spec("sklearn").origin).parent / "datasets/data/digits.csv.gz",
    delimiter=",",
    dtype=np.float32,
)


def batches(batch_size: int, *shape: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield shuffled images of this shape, about one in size, with their classes."""
    images = torch.tensor(_ROWS[:, :-1]).div(8).sub(1).reshape(-1, *shape)
    classes = torch.tensor(_ROWS[:, -1]).long()
    while True:
        order = torch.randperm(len(classes))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield images[chosen], classes[chosen]
