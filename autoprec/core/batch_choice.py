"""The second answer of a tuning: what is known of the batch besides the recipe's own speed."""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.core.codec import bounded
from autoprec.core.numerics.noise_scale import NoiseScale

_MOST = 2**31


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    """Batches, each of a whole update: the baseline's and the chosen recipe's; what decided.

    `rule` is the setting `batch`. Of the trials of the recipe's policy, `knee` is the smallest
    batch within 2 % of the most samples a second that the loader feeds, `fits` the largest that ran
    (None: nothing but one batch was to be tried). `loader_feeds` is in samples a second, by the
    loader's own time at the chosen batch (None: it takes none). `noise_scale` is the
    gradient's, as the proof's float32 training showed it.
    """

    yours: int = bounded(low=1, high=_MOST)
    chosen: int = bounded(low=1, high=_MOST)
    rule: str = "knee"
    knee: int | None = bounded(default=None, low=1, high=_MOST)
    fits: int | None = bounded(default=None, low=1, high=_MOST)
    loader_feeds: float | None = bounded(default=None, low=0.0, high=1e15)
    noise_scale: NoiseScale | None = None
