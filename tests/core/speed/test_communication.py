"""When communication gets trials: where a step waits for it, measured with the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from factories import steady

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Distributed
from autoprec.core.speed.acquisition import Next, next_point
from autoprec.core.speed.communication import MIN_EXPOSED_SHARE, communication_may_pay
from autoprec.core.speed.space import Point, Space
from autoprec.core.speed.stopping import Limits
from autoprec.core.speed.trial_results import Outcome, Status

SPACE = Space(
    policies=(Policy.FLOAT32, Policy.MIXED_BFLOAT16),
    batch_sizes=(32,),
    distributed=Distributed("ddp", 2),
    rank_levels={"reduce_dtype": ("float32", "bfloat16"), "bucket_mb": (25, 100)},
)
BASELINE: Point = {name: levels[0] for name, levels in SPACE.levels().items()}


def outcome(point: Point, exposed: float | None, seconds: float = 0.01) -> Outcome:
    ratio = None if exposed is None else Ratio(exposed, exposed, exposed, 6)
    measured: Measurement = replace(steady(seconds), exposed_communication=ratio)
    return Outcome(point, Status.OK, measured)


def larger_buckets(point: Mapping[str, object]) -> Point:
    return {**BASELINE, **point, "bucket_mb": 100}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("exposed", "pays"),
    [(None, False), (0.0, False), (MIN_EXPOSED_SHARE - 0.01, False), (MIN_EXPOSED_SHARE, True)],
)
def test_buckets_are_tried_where_the_baseline_waits(exposed: float | None, pays: bool) -> None:
    history = [outcome(BASELINE, exposed)]
    assert communication_may_pay(larger_buckets({}), BASELINE, history) is pays
    other = [outcome({**BASELINE, "policy": "mixed_bfloat16"}, 0.5)]
    assert not communication_may_pay(larger_buckets({}), BASELINE, other)
    assert not communication_may_pay(larger_buckets({}), BASELINE, [])


def test_the_reductions_dtype_is_tried_in_any_case() -> None:
    rounded = {**BASELINE, "reduce_dtype": "bfloat16"}
    assert communication_may_pay(rounded, BASELINE, [outcome(BASELINE, 0.0)])
    assert communication_may_pay({"policy": "float32"}, {"policy": "float32"}, [])


def tried(exposed: float) -> set[tuple[str, int]]:
    """Return the reductions' dtypes and buckets that a whole search measures."""
    history: list[Outcome] = []
    while isinstance(found := next_point(SPACE, BASELINE, history, Limits()), Next):
        assert found.point is not None
        history.append(outcome(found.point, exposed))
    return {(str(each.point["reduce_dtype"]), int(each.point["bucket_mb"])) for each in history}


def test_a_search_leaves_buckets_alone_where_nothing_waits() -> None:
    assert tried(0.01) == {("float32", 25), ("bfloat16", 25)}
    assert {bucket for _, bucket in tried(0.3)} == {25, 100}
