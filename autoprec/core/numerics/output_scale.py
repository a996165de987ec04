"""What an error of a model's outputs is a share of: how they vary over the batch."""

from __future__ import annotations

FLAT_SHARE = 1e-6
"""Outputs that vary less, as a share of their size, say the same of all samples: what is left is
float32's own rounding, 6e-8 for each operation."""


def scale_of(spread: float, size: float) -> float:
    """Return the norm that an error counts against: the `spread` about the mean, or the `size`.

    Both are Euclidean norms. A head that starts as its bias alone gives outputs that do not vary:
    the error of such ones is a share of the outputs themselves.
    """
    return spread if spread > FLAT_SHARE * size else size
