"""Whether freed memory is kept is settled at the baseline, and all other recipes follow."""

from __future__ import annotations

import pytest
from factories import ran_at

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import KEEP_MEMORY
from autoprec.core.speed.acquisition import Next, next_point
from autoprec.core.speed.keep_memory import clearly_pays, describe_gain, start_point
from autoprec.core.speed.space import BATCH, Point, Space
from autoprec.core.speed.stopping import Limits, Stop
from autoprec.core.speed.trial_results import Outcome, Status

SPACE = Space(
    policies=(Policy.FLOAT32, Policy.MIXED_BFLOAT16),
    batch_sizes=(8, 16, 32, 64, 128),
    knobs={KEEP_MEMORY: (False, True)},
)
BASELINE: Point = {
    "policy": "float32",
    "memory_format": "contiguous",
    "compile": False,
    KEEP_MEMORY: False,
    BATCH: 32,
}
KEEPING: Point = {**BASELINE, KEEP_MEMORY: True}


@pytest.mark.parametrize(
    ("kept", "start", "sure"),
    [
        (200.0, KEEPING, True),
        (110.0, KEEPING, False),
        (60.0, KEEPING, False),
    ],
)
def test_memory_is_kept_where_it_can_be_and_two_trials_seldom_say_that_it_pays(
    kept: float, start: Point, sure: bool
) -> None:
    history = [ran_at(BASELINE, 100.0), ran_at(KEEPING, kept)]
    assert start_point(SPACE, BASELINE, history) == start
    assert clearly_pays(SPACE, BASELINE, history, 64) is sure
    assert clearly_pays(SPACE, BASELINE, history, 128)  # with tensors so much larger


def test_the_user_is_told_what_it_gains() -> None:
    clear = describe_gain(BASELINE, [ran_at(BASELINE, 100.0), ran_at(KEEPING, 136.0)])
    assert clear.endswith("with it, the baseline ran at 1.36x its speed")
    unclear = describe_gain(BASELINE, [ran_at(BASELINE, 100.0), ran_at(KEEPING, 97.0)])
    assert "the baseline's 0.97x, of one short trial each, decides nothing" in unclear
    assert unclear.endswith("whether the chosen recipe keeps it is measured at the end")
    assert describe_gain(BASELINE, [ran_at(BASELINE, 100.0)]) == ""


def test_what_does_not_run_is_not_kept() -> None:
    history = [ran_at(BASELINE, 100.0), ran_at(KEEPING, 200.0, Status.OUT_OF_MEMORY)]
    assert start_point(SPACE, BASELINE, history) == BASELINE


def test_without_the_knob_the_baseline_is_where_the_search_starts() -> None:
    space = Space(policies=SPACE.policies, batch_sizes=SPACE.batch_sizes)
    plain = {name: value for name, value in BASELINE.items() if name != KEEP_MEMORY}
    assert start_point(space, plain, []) == plain
    assert not clearly_pays(space, plain, [ran_at(plain, 100.0)], 64)


def searched(fails: bool) -> list[Outcome]:
    """A whole search on a machine where the batch is all that counts, if kept memory runs."""
    history: list[Outcome] = []
    while True:
        decision = next_point(SPACE, BASELINE, history, Limits())
        if isinstance(decision, Stop):
            return history
        assert isinstance(decision, Next)
        assert decision.point is not None
        crashes = fails and decision.point[KEEP_MEMORY]
        status = Status.CRASHED if crashes else Status.OK
        history.append(ran_at(decision.point, 10.0 * float(decision.point[BATCH]), status))


@pytest.mark.parametrize("fails", [False, True])
def test_the_search_asks_once_and_then_stays_in_one_mode(fails: bool) -> None:
    """A process cannot take the knob back: to and fro would cost a new worker each time."""
    history = searched(fails)
    assert [dict(o.point) for o in history[:2]] == [BASELINE, KEEPING]
    assert len(history) > 3
    assert all(o.point[KEEP_MEMORY] is not fails for o in history[2:])
    assert max(history, key=lambda o: o.rate).point[BATCH] == 128
