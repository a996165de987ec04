"""Finds the batch of the most goodput: samples a second, times what each of them is worth.

The samples that a loss needs grow with the batch B as 1 + B / N, where N is the gradient noise
scale (McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162). Goodput
is the rate over that (Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized
Deep Learning", OSDI 2021). It holds for an optimizer whose learning rate is moved with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.speed.ladder import largest_that_ran
from autoprec.core.speed.space import BATCH
from autoprec.core.speed.trial_results import Outcome, fit_model


def goodput_batch(
    sizes: Sequence[int],
    history: Sequence[Outcome],
    leader: Outcome,
    scale: NoiseScale,
    ranks: int = 1,
) -> int:
    """Return the micro-batch of the most goodput, of the `sizes` up to the largest that ran.

    How fast the `leader` is at each is as the trials predict it, or as the loader feeds it, where
    that is known. Each of the `ranks` has a micro-batch of its own.
    """
    ran = [outcome for outcome in history if outcome.rate > 0]
    model, largest = fit_model(ran), largest_that_ran(ran)
    feeds: dict[int, float] = {}
    for outcome in ran:
        size = int(outcome.point[BATCH])
        feeds[size] = max(feeds.get(size, 0.0), outcome.loader_feeds)

    def goodput(size: int) -> float:
        rate = math.exp(model.predict({**leader.point, BATCH: size}).mean)
        return min(rate, feeds.get(size, math.inf)) / scale.samples_factor(ranks * size)

    return max((size for size in sorted(sizes) if size <= largest), key=goodput)
