"""Decides when float16 gets trials: where bfloat16 is as fast, only if that one fails or is slow.

On such devices float16 is a question of numerics, and bfloat16 has the better: within 3 % of each
other run 96 % of 1,628 models in inference on one GPU (timm's tables), and in the 16 pairs recorded
on two GPUs (`benchmarks/results/gpu_grid-*`) float16's median is 0.87 of bfloat16's speed.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.core.dtypes import Policy
from autoprec.core.speed.feasibility import BATCH_TOO_LARGE
from autoprec.core.speed.space import Space, point_key
from autoprec.core.speed.trial_results import Outcome

_FLOAT16, _BFLOAT16 = Policy.MIXED_FLOAT16.value, Policy.MIXED_BFLOAT16.value


def float16_waits(space: Space, history: Sequence[Outcome]) -> bool:
    """Return whether float16 is not to be tried yet, as bfloat16 may be the answer.

    It is tried once every trial of bfloat16 failed, or was slower than float32 alike.
    """
    if not space.float16_waits or any(o.point["policy"] == _FLOAT16 for o in history):
        return False
    rates = {point_key(outcome.point): outcome.rate for outcome in history}
    ran = [o for o in history if o.point["policy"] == _BFLOAT16 and o.status not in BATCH_TOO_LARGE]
    alike = [point_key({**o.point, "policy": Policy.FLOAT32.value}) for o in ran]
    slow = all(o.rate <= rates.get(key, 0.0) for o, key in zip(ran, alike, strict=True))
    return not (ran and slow)
