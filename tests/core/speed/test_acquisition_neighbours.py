"""What is tried next to the fastest recipe although no expected gain asks for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.speed.acquisition import Next, next_point
from autoprec.core.speed.space import BATCH, Space, powers_of_two
from autoprec.core.speed.stopping import Limits, Stop
from tests.core.speed.machines import (
    BASELINE,
    ONE,
    SIZES,
    SPACE,
    TWO,
    Machine,
    at,
    measured,
    ran,
    search,
)

#: No gain is expected to be large enough: what is still tried is tried for the model's doubts.
NEIGHBOURS_ONLY = Limits(gain=math.inf)


def next_neighbour(space, *histories, limits=NEIGHBOURS_ONLY):
    """The point that is tried next for a doubt; None: none."""
    history = [outcome for each in histories for outcome in each]
    plain = {name: levels[0] for name, levels in space.levels().items()}
    base = {**plain, "policy": "float32", BATCH: history[0].point[BATCH]}
    assert history[0].point == base
    decision = next_point(space, base, history, limits)
    if isinstance(decision, Stop):
        return None
    assert decision.reason == "next to the fastest"
    return decision.point


@pytest.mark.parametrize(("cliff", "beside"), [(128, 64), (64, 128)])
def test_the_batch_beside_the_fastest_is_tried_however_slow_it_is_foreseen_to_be(cliff, beside):
    others = [size for size in SIZES if size not in (cliff, beside)]
    history = (ran(others), ran([cliff], speed=4000.0))
    assert next_neighbour(ONE, *history) == at(beside)
    assert next_neighbour(ONE, *history, limits=replace(NEIGHBOURS_ONLY, cheap_seconds=1.0)) == at(
        beside
    )
    assert (
        next_neighbour(ONE, *history, limits=replace(NEIGHBOURS_ONLY, cheap_seconds=0.99)) is None
    )


def test_a_batch_between_tried_ones_is_tried_where_it_is_foreseen_to_be_nearly_as_fast():
    """Of batches 16, 32 and 64 the last alone: a cliff would make it the fastest."""
    assert next_neighbour(ONE, ran([8, 128, 256])) == at(64)
    assert next_neighbour(ONE, ran([8, 128, 256, 64])) is None


def test_beyond_the_tried_batches_the_largest_is_tried_and_below_them_none():
    space = replace(ONE, batch_sizes=powers_of_two(8, 512))
    tried = ran([64, 32, 128], flat=True)
    assert next_neighbour(space, tried) == at(512)
    assert next_neighbour(space, tried, ran([256, 512], speed=990.0, flat=True)) is None


def test_a_batch_that_another_knob_ran_at_is_not_between_for_that():
    space = replace(
        ONE, batch_sizes=powers_of_two(8, 128), knobs={"fused_optimizer": (False, True)}
    )
    own = ran([64, 32, 16, 128], flat=True, fused_optimizer=False)
    other = ran([8, 128], speed=900.0, flat=True, fused_optimizer=True)
    assert next_neighbour(space, own) is None
    assert next_neighbour(space, own, other) is None


def test_the_fastest_recipe_is_tried_with_one_factor_changed_at_its_own_batch():
    """Twice was the other level measured, at small batches; it is not sure that it is slower."""
    fast, slow = ran(SIZES, flat=True), ran([8, 16], "mixed_bfloat16", 900.0, flat=True)
    best = [measured(at(64), 1100.0)]
    history = [o for o in fast if o.point != at(64)]
    assert next_neighbour(TWO, history, best, slow) == at(64, "mixed_bfloat16")
    again = ran([64], "mixed_bfloat16", 900.0, flat=True)
    assert next_neighbour(TWO, history, best, slow, again) is None


def test_out_of_reach_the_other_level_comes_nearer_step_by_step():
    space = replace(TWO, batch_sizes=powers_of_two(8, 1024))
    fast = ran(powers_of_two(8, 1024))
    slow = ran([8, 16], "mixed_bfloat16", 900.0)
    assert next_neighbour(space, fast, slow) == at(128, "mixed_bfloat16")


@pytest.mark.parametrize(("speed", "tried"), [(980.0, at(64, "mixed_bfloat16")), (100.0, None)])
def test_between_measured_ones_only_what_is_not_surely_slower_is_tried(speed, tried):
    fast = [o for o in ran(SIZES, flat=True) if o.point != at(64)]
    other = ran([16, 128], "mixed_bfloat16", speed, flat=True)
    assert next_neighbour(TWO, fast, [measured(at(64), 1100.0)], other) == tried


def test_a_level_that_ran_once_is_tried_again_at_any_batch():
    fast = [o for o in ran(SIZES, flat=True) if o.point != at(64)]
    once = ran([64], "mixed_bfloat16", 500.0, flat=True)
    found = next_neighbour(TWO, fast, [measured(at(64), 1100.0)], once)
    assert found is not None
    assert (found["policy"], found[BATCH] != 64) == ("mixed_bfloat16", True)
    twice = ran([64, found[BATCH]], "mixed_bfloat16", 500.0, flat=True)
    assert next_neighbour(TWO, fast, [measured(at(64), 1100.0)], twice) is None


def test_two_changed_factors_or_another_knob_are_no_doubt():
    space = replace(
        TWO,
        batch_sizes=(32,),
        memory_formats=("contiguous", "channels_last"),
        knobs={"fused_optimizer": (False, True)},
    )
    plain = {"fused_optimizer": False}
    history = (
        ran([32], **plain),
        ran([32], "mixed_bfloat16", 900.0, **plain),
        ran([32], speed=900.0, memory_format="channels_last", **plain),
    )
    assert next_neighbour(space, *history) is None


def test_of_two_doubts_that_are_alike_the_first_is_tried():
    fast = [o for o in ran(SIZES, flat=True) if o.point != at(64)]
    best = [measured(at(64), 1100.0)]
    policies = ("mixed_bfloat16", "mixed_float16")
    slow = [ran([8, 16], policy, 900.0, flat=True) for policy in policies]
    space = replace(TWO, policies=(*TWO.policies, Policy.MIXED_FLOAT16))
    assert next_neighbour(space, fast, best, *slow) == at(64, "mixed_bfloat16")


def test_a_doubt_twice_as_dear_is_allowed_for_another_factor():
    fast = [o for o in ran(SIZES, flat=True) if o.point != at(64)]
    best = [measured(at(64), 1100.0)]
    slow = ran([8, 16], "mixed_bfloat16", 900.0, flat=True)
    assert (
        next_neighbour(TWO, fast, best, slow, limits=replace(NEIGHBOURS_ONLY, cheap_seconds=0.5))
        is not None
    )
    assert (
        next_neighbour(TWO, fast, best, slow, limits=replace(NEIGHBOURS_ONLY, cheap_seconds=0.49))
        is None
    )


def test_recipes_of_less_than_a_sample_per_second_are_searched_alike():
    def slowed(outcome):
        seconds = outcome.measurement
        slow = {n: 1e4 * getattr(seconds, n) for n in ("step_seconds", "low", "high")}
        return replace(outcome, measurement=replace(seconds, **slow))

    patient = Limits(setup_seconds=5e3, timed_seconds=5e3, cheap_seconds=3e4, gain_per_second=5e-8)
    machine = Machine()
    history = []
    while isinstance(decision := next_point(SPACE, BASELINE, history, patient), Next):
        history.append(slowed(machine.run(decision.point)))
    usual, stop = search(Machine())
    assert [o.point for o in history] == [o.point for o in usual]
    assert decision == stop


@pytest.mark.parametrize("gain", [1.2, 0.9])
def test_float8_is_tried_once_compiled_bfloat16_is_the_fastest(gain):
    policies, sizes = (Policy.FLOAT32, Policy.MIXED_BFLOAT16), powers_of_two(8, 64)
    knobs = {"float8": (False, True)}
    space = Space(policies, sizes, compile=(False, True), knobs=knobs)
    baseline, history = at(float8=False), []

    def rate(point):
        speed = 2.0 if point["policy"] == "mixed_bfloat16" else 1.0
        speed *= 1.4 if point["compile"] else 1.0
        return (
            1000 * speed * (gain if point["float8"] else 1.0) * point[BATCH] / (point[BATCH] + 32)
        )

    while isinstance(decision := next_point(space, baseline, history, Limits()), Next):
        history.append(measured(decision.point, rate(decision.point)))
    tried = [outcome.point for outcome in history]
    assert any(point["float8"] for point in tried)
    assert len(history) < len(space.points())
    assert max(history, key=lambda outcome: outcome.rate).point["float8"] is (gain > 1.0)
    first = next(i for i, point in enumerate(tried) if point["float8"])
    assert any(p["compile"] and p["policy"] == "mixed_bfloat16" for p in tried[:first])
