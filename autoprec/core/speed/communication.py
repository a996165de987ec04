"""Decides which settings of how ranks communicate are worth trials.

Larger buckets, or parameters that stay gathered, can bring no more than what a step waits for
communication. That is measured with the baseline; where it is little, they are left alone. The
reduction's dtype is tried in any case: it also halves what computing and memory pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.core.speed.space import Point, point_key
from autoprec.core.speed.trial_results import Outcome

#: Where a step of the baseline waits for communication for less than this share, nothing but the
#: reduction's dtype is tried: half of it would hardly be worth recommending.
MIN_EXPOSED_SHARE = 0.05

_DEPENDENT = ("bucket_mb", "reshard_after_forward")


def communication_may_pay(point: Point, baseline: Point, history: Sequence[Outcome]) -> bool:
    """Return whether what a point sets of communication beside its dtype is worth a trial."""
    if all(point[name] == baseline[name] for name in _DEPENDENT if name in point):
        return True
    return _exposed_share(baseline, history) >= MIN_EXPOSED_SHARE


def _exposed_share(baseline: Point, history: Sequence[Outcome]) -> float:
    """Return the share of the baseline's step that waits for communication; 0 where unknown."""
    measured = (o.measurement for o in history if point_key(o.point) == point_key(baseline))
    exposed = next((each.exposed_communication for each in measured if each is not None), None)
    return 0.0 if exposed is None else exposed.ratio
