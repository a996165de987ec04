"""The gradient noise scale: the batch at which noise and gradient are as large as each other.

The square of a batch's gradient is |G|^2 + tr(S) / B in the mean: of the whole data's gradient G,
and of the noise, which falls with the batch B. The ratio tr(S) / |G|^2 is a batch; far below it a
larger batch needs no more samples for the same loss, at it twice as many (McCandlish et al., "An
Empirical Model of Large-Batch Training", arXiv 1812.06162). Two batches at the same weights give
both without bias: half of the square of their difference is the noise. What is seen in a short
training from fresh weights is the least: the scale grows while the loss falls (Merrill et al.,
arXiv 2505.23971). It is of plain gradients; an optimizer that scales each by itself sees another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.core.codec import bounded

#: A share of noise above this is not told from noise alone, one below its inverse from none.
_MOST_SHARE = 0.999

_MOST_SAMPLES = 1e12


@dataclass(frozen=True)
class NoiseScale:
    """The scale in samples at several steps of a float32 training: in the mean, and its range.

    None: larger than can be told. `batch` is that of the gradients.
    """

    at: float | None = bounded(low=0.0, high=_MOST_SAMPLES)
    low: float | None = bounded(low=0.0, high=_MOST_SAMPLES)
    high: float | None = bounded(low=0.0, high=_MOST_SAMPLES)
    batch: int = bounded(low=1, high=2**31)
    first_step: int = bounded(default=0, low=0, high=2**31)
    last_step: int = bounded(default=0, low=0, high=2**31)

    def samples_factor(self, batch: int) -> float:
        """Return how many times the samples of a tiny batch this one needs for the same loss.

        Where even a tiny batch has next to no noise, that is in proportion to the batch.
        """
        return 1.0 if self.at is None else 1.0 + batch / max(self.at, 1e-9)

    def samples_needed(self, batch: int, instead_of: int) -> float | None:
        """Return how many times the samples a batch needs at most, for the loss of another.

        That is by the least of the range; None if it is not known.
        """
        if self.low is None:
            return 1.0
        return (self.low + batch) / (self.low + instead_of) if self.low + instead_of else None


def noise_share(error: float | None, error_of_other: float | None) -> float | None:
    """Return which share of a gradient's mean square is noise, from two at the same weights.

    Each error is the norm of the gradients' difference over that of one of them. None if it is
    not finite, or if both gradients are the same.
    """
    if not error or not error_of_other:
        return None
    return 1.0 / (error**-2 + error_of_other**-2)


def noise_scale(shares: Sequence[tuple[int, float | None]], batch: int) -> NoiseScale | None:
    """Return the scale from the shares of noise at several steps, each of gradients of `batch`.

    None if fewer than two are known.
    """
    known = [(step, share) for step, share in shares if share is not None]
    if len(known) < 2:
        return None
    known_shares = [share for _, share in known]
    at, low, high = (
        _samples(share, batch)
        for share in (sum(known_shares) / len(known), min(known_shares), max(known_shares))
    )
    steps = [step for step, _ in known]
    return NoiseScale(at, low, high, batch, min(steps), max(steps))


def _samples(share: float, batch: int) -> float | None:
    return batch * share / (1.0 - share) if share < _MOST_SHARE else None
