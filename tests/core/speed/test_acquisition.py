"""The search as a whole: it ends, and finds nearly the fastest recipe."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.dtypes import Policy
from autoprec.core.speed.acquisition import Next, next_point
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.feasibility import same_arm, why_ruled_out
from autoprec.core.speed.space import BATCH, Space, point_key, powers_of_two
from autoprec.core.speed.stopping import OUT_OF_TIME, Limits, Stop
from autoprec.core.speed.trial_results import Outcome, Status, possibly_disturbed, shortlist
from tests.core.speed.machines import (
    BASELINE,
    LIMITS,
    LONG,
    SPACE,
    TWO,
    Machine,
    at,
    machines,
    measured,
    search,
    true_rate,
)


@settings(max_examples=25, deadline=None)
@given(machines, st.sampled_from([None, 1, 5]), st.sampled_from([None, 1800.0]))
def test_the_search_ends_and_every_step_of_it_makes_sense(machine, trials, memory):
    limits = Limits(memory_bytes=memory, trials=trials)
    history, stop = search(machine, limits)
    points = [outcome.point for outcome in history]
    assert stop.reason
    assert points[0] == BASELINE
    assert len({point_key(point) for point in points}) == len(points) <= len(SPACE.points())
    assert all(point in SPACE.points() for point in points)
    assert trials is None or len(points) <= trials
    for index, point in enumerate(points[1:], start=1):
        before = history[:index]
        assert why_ruled_out(point, before, limits.memory_bytes) == ""
        if point["policy"] not in {outcome.point["policy"] for outcome in before}:
            plain = any(o.rate > 0 and same_arm(o.point, BASELINE) for o in before)
            assert same_arm({**point, "policy": "float32"}, BASELINE) or not plain
            ran = [int(o.point[BATCH]) for o in before if o.rate > 0]
            assert not ran or point[BATCH] <= max(ran)


@settings(max_examples=10, deadline=None)
@given(machines)
def test_the_same_history_gives_the_same_proposal(machine):
    history, stop = search(machine)
    for index in range(len(history)):
        decision = next_point(SPACE, BASELINE, history[:index], LIMITS)
        assert isinstance(decision, Next)
        assert decision.point == history[index].point
    assert next_point(SPACE, BASELINE, history, LIMITS) == stop


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_the_search_finds_nearly_the_best_at_a_fraction_of_the_points(seed):
    history, stop = search(Machine(seed, noise=0.003))
    best = max(true_rate(point) for point in SPACE.points())
    found = max(history, key=lambda outcome: outcome.rate)
    assert true_rate(found.point) >= 0.97 * best
    assert len(history) <= len(SPACE.points()) / 2
    assert stop == Stop("no untried recipe is likely to be more than 1% faster")


def test_a_policy_that_is_slow_where_it_is_first_tried_is_left_alone():
    history, _ = search(Machine())
    assert sum(outcome.point["policy"] == "mixed_float16" for outcome in history) == 1


def test_what_is_foreseen_is_said_of_points_that_may_be_chosen_and_comes_true():
    """A timing far from it is doubted; policies never tried are foreseen to be float32's."""
    machine, history, errors = Machine(), [], []
    while isinstance(step := next_point(SPACE, BASELINE, history, LIMITS), Next):
        if step.reason.endswith("under another policy"):
            (alike,) = [o for o in history if o.point == {**step.point, "policy": "float32"}]
            assert step.expected_rate == alike.rate
        elif step.reason in ("the baseline", "a larger batch"):
            assert step.expected_rate == 0.0
        elif step.expected_rate:
            errors.append(abs(math.log(step.expected_rate / true_rate(step.point))))
        history.append(machine.run(step.point))
    assert len(errors) == 3
    assert max(errors) < math.log(SPEED.disturbed_ratio_range[0]), "a true rate is not doubted"


class Neighbour(Machine):
    """Another process takes a quarter of the machine during one trial, named by its number."""

    def __init__(self, number):
        super().__init__()
        self.number, self.trials = number, 0

    def run(self, point):
        self.trials += 1
        rate = true_rate(point) * (0.75 if self.trials == self.number else 1.0)
        return measured(point, rate, peak=1000)


@pytest.mark.parametrize("number", range(1, 9))
def test_one_disturbed_trial_hides_the_fastest_recipe_from_nobody(number):
    """It is among the three fastest found, or may be disturbed: re-ranking times both."""
    history, _ = search(Neighbour(number))
    looked_at = [
        outcome.point for outcome in (*shortlist(history, SPACE), *possibly_disturbed(history)[:1])
    ]
    best = max(true_rate(point) for point in SPACE.points())
    assert max(true_rate(point) for point in looked_at) >= 0.97 * best


def test_a_level_is_not_judged_by_one_trial():
    """It is where a layout is first tried that the neighbour is there, for longer than a trial."""

    class Unlucky(Machine):
        def run(self, point):
            first = point["memory_format"] == "channels_last" and point[BATCH] == 256
            return measured(point, true_rate(point) * (0.5 if first else 1.0), peak=1000)

    history, _ = search(Unlucky())
    sizes = {o.point[BATCH] for o in history if o.point["memory_format"] == "channels_last"}
    assert 256 in sizes
    assert sizes - {256}


def test_where_nothing_has_run_the_smallest_batch_is_next():
    failed = [Outcome(BASELINE, Status.TIMEOUT)]
    decision = next_point(SPACE, BASELINE, failed, LIMITS)
    assert isinstance(decision, Next)
    assert decision.point[BATCH] == 8
    assert "nothing has run yet" in decision.reason


class Host(Machine):
    """A GPU whose step takes as long as the host needs, up to batch 256 in float32."""

    def run(self, point):
        size, speed = int(point[BATCH]), {"float32": 1.0, "mixed_bfloat16": 2.0}
        device = size * 4e-5 / speed[point["policy"]] / (1.3 if point["compile"] else 1.0)
        return measured(point, size / (0.0001 + max(0.01, device)), peak=1000)


class Busy(Machine):
    """A CPU that batch 32 keeps busy."""

    def run(self, point):
        size, speed = int(point[BATCH]), {"float32": 1.0, "mixed_bfloat16": 2.0}
        seconds = 0.0001 + size * 1e-3 / speed[point["policy"]] / (1.3 if point["compile"] else 1)
        return measured(point, size / seconds, peak=1000)


class Starved(Machine):
    """A GPU that waits for its loader from batch 128 on."""

    def run(self, point):
        found = Host().run(point)
        slow = replace(found.measurement, data_seconds=int(point[BATCH]) * 1e-4)
        return replace(found, measurement=slow)


@pytest.mark.parametrize(
    ("machine", "ladder", "compared_at"),
    [(Host(), [32, 128, 1024, 4096], 1024), (Busy(), [32, 128], 32)],
)
def test_the_batch_grows_first_then_policies_run_at_it_then_both_are_compiled(
    machine, ladder, compared_at
):
    policies = (Policy.FLOAT32, Policy.MIXED_BFLOAT16)
    space = Space(policies, powers_of_two(8, 4096), compile=(False, True))
    history, _ = search(machine, space=space)
    tried = [(o.point["policy"], o.point["compile"], o.point[BATCH]) for o in history]
    rungs = len(ladder)
    assert tried[:rungs] == [("float32", False, size) for size in ladder]
    assert tried[rungs] == ("mixed_bfloat16", False, compared_at)
    compiled = tried[rungs + 1 : rungs + 3]
    assert {policy for policy, _, _ in compiled} == {"float32", "mixed_bfloat16"}
    assert all(wanted for _, wanted, _ in compiled)
    best = max(history, key=lambda outcome: outcome.rate).point
    assert (best["policy"], best["compile"]) == ("mixed_bfloat16", True)


def test_no_batch_grows_beyond_what_the_loader_feeds():
    """One rung shows that it feeds no more at larger ones; policies are compared all the same."""
    space = Space((Policy.FLOAT32, Policy.MIXED_BFLOAT16), powers_of_two(8, 4096))
    history, _ = search(Starved(), space=space)
    assert [o.point for o in history[:3]] == [at(32), at(128), at(128, "mixed_bfloat16")]
    assert max(outcome.point[BATCH] for outcome in history) == 128


def test_the_batch_grows_where_the_loader_feeds_more_at_larger_ones():
    class Collating(Machine):
        """A loader that needs as long for a batch of any size, up to 4096."""

        def run(self, point):
            found = Host().run(point)
            return replace(found, measurement=replace(found.measurement, data_seconds=0.02))

    history, _ = search(Collating(), space=Space((Policy.FLOAT32,), powers_of_two(8, 4096)))
    assert max(outcome.point[BATCH] for outcome in history) >= 1024


def test_a_batch_that_could_not_be_proven_in_time_is_not_tried():
    """The host's ladder ends at 4096, with steps of 0.16 s; batch 1024 takes 0.04."""
    space = Space((Policy.FLOAT32, Policy.MIXED_BFLOAT16), powers_of_two(8, 4096))
    history, _ = search(Host(), replace(LIMITS, longest_step=0.05), space)
    steps = [outcome.measurement.step_seconds for outcome in history]
    assert 0.03 < max(steps) < 0.05
    assert {o.point["policy"] for o in history} == {"float32", "mixed_bfloat16"}


class WithoutCompiler(Busy):
    """A machine on which nothing compiles."""

    def run(self, point):
        if point["compile"]:
            return Outcome(point, Status.UNSUPPORTED, reason="no Triton")
        return super().run(point)


def test_a_compiler_that_fails_under_two_policies_is_left_alone():
    space = replace(TWO, compile=(False, True), memory_formats=SPACE.memory_formats)
    history, _ = search(WithoutCompiler(), space=space)
    failed = [o.point["policy"] for o in history if o.point["compile"]]
    assert sorted(failed) == ["float32", "mixed_bfloat16"]
    assert {o.point["memory_format"] for o in history} == set(SPACE.memory_formats)


def test_a_policy_that_does_not_fit_at_the_ladders_end_is_tried_below_it():
    space = Space((Policy.FLOAT32, Policy.MIXED_BFLOAT16), powers_of_two(8, 1024))
    history = [Host().run(at(size)) for size in (32, 128, 1024)]
    for size in (1024, 512):
        decision = next_point(space, BASELINE, history, LIMITS)
        assert decision.point == at(size, "mixed_bfloat16")
        history.append(Outcome(decision.point, Status.OUT_OF_MEMORY, reason="no memory"))


def test_a_policy_that_gains_nothing_at_the_baseline_is_compared_where_steps_are_cheap():
    """At the ladder's end a step of float32 takes seconds, of an emulated policy minutes."""
    slow = [measured(at(size), rate) for size, rate in ((32, 100.0), (64, 160.0), (128, 200.0))]
    space = replace(TWO, batch_sizes=powers_of_two(8, 128))
    decision = next_point(space, BASELINE, slow, LIMITS)
    assert decision == Next(at(64, "mixed_bfloat16"), "batch 64 under another policy", 200.0)


def test_batches_grow_at_most_eightfold():
    history, _ = search(Machine())
    for index, outcome in enumerate(history[1:], start=1):
        ran = [int(o.point[BATCH]) for o in history[:index] if o.rate > 0]
        assert int(outcome.point[BATCH]) <= 8 * max(ran)


class Cliff(Machine):
    """A library whose kernels are twice as fast at batch 128 alone."""

    def run(self, point):
        outcome = super().run(point)
        return measured(point, outcome.rate * (2 if point[BATCH] == 128 else 1), peak=1000)


@pytest.mark.parametrize("seed", range(8))
def test_a_cliff_that_no_model_foresees_is_found(seed):
    history, _ = search(Cliff(seed, noise=0.02))
    best = max(history, key=lambda outcome: outcome.rate)
    assert best.point[BATCH] == 128


class Last(Machine):
    """A library that is a quarter slower from batch 256 on, but at the largest twice as fast."""

    def run(self, point):
        outcome = super().run(point)
        size = point[BATCH]
        return measured(point, outcome.rate * (8 if size == 1024 else 2.9 if size >= 256 else 4))


@pytest.mark.parametrize("seed", range(12))
def test_the_largest_batch_is_looked_at_although_larger_ones_were_slower(seed):
    history, _ = search(Last(seed, noise=0.03), space=replace(SPACE, batch_sizes=LONG))
    assert max(history, key=lambda outcome: outcome.rate).point[BATCH] == 1024


@pytest.mark.parametrize("half", [100, 300, 600, 1200])
@pytest.mark.parametrize("knobs", [{}, {"fused_optimizer": (False, True)}])
def test_a_policy_that_wins_at_large_batches_only_is_found(half, knobs):
    class Crossing(Machine):
        def run(self, point):
            size = int(point[BATCH])
            low = point["policy"] == "mixed_bfloat16"
            rate = 4000 * size / (size + half) if low else 1000 * size / (size + 32)
            return measured(point, rate, peak=1000)

    space = Space((Policy.FLOAT32, Policy.MIXED_BFLOAT16), LONG, knobs=knobs)
    base = {**BASELINE, **dict.fromkeys(knobs, False)}
    history = []
    while isinstance(decision := next_point(space, base, history, LIMITS), Next):
        history.append(Crossing().run(decision.point))
    best = max(history, key=lambda outcome: outcome.rate).point
    assert (best["policy"], best[BATCH]) == ("mixed_bfloat16", 1024)


def test_batches_of_dear_steps_grow_one_size_at_a_time():
    class Slow(Machine):
        def run(self, point):
            return measured(point, true_rate(point) / 200, peak=1000)

    history, _ = search(Slow())
    assert len({outcome.point[BATCH] for outcome in history}) > 2
    largest = {}
    for outcome in history:
        place, size = (
            (outcome.point["policy"], outcome.point["memory_format"]),
            outcome.point[BATCH],
        )
        before = largest.get(place)
        if before is not None and size > before:
            assert size == 2 * before
        largest[place] = max(size, before or 0)


def test_the_batches_beside_the_fastest_are_tried_before_the_end():
    history, _ = search(Machine(3, noise=0.02))
    fastest = max(history, key=lambda outcome: outcome.rate).point
    sizes = SPACE.batch_sizes
    at = sizes.index(int(fastest[BATCH]))
    tried = {point_key(outcome.point) for outcome in history}
    for size in (*sizes[at + 1 : at + 2], *sizes[max(0, at - 1) : at]):
        assert point_key({**fastest, BATCH: size}) in tried


class Losing(Machine):
    """A compiler that doubles float32's speed and takes all from bfloat16, which is the fastest."""

    def run(self, point):
        law = int(point[BATCH]) / (int(point[BATCH]) + 200)
        speed = {"float32": 1.0, "mixed_bfloat16": 4.0, "mixed_float16": 0.5}[point["policy"]]
        return measured(point, 1000 * law * (1.8 if point["compile"] else speed))


@pytest.mark.parametrize("batch", [8, 32])
def test_a_compiler_that_loses_what_a_policy_wins_does_not_hide_the_policy(batch):
    space = replace(SPACE, compile=(False, True))
    base = {**BASELINE, BATCH: batch}
    history = []
    while isinstance(decision := next_point(space, base, history, LIMITS), Next):
        history.append(Losing().run(decision.point))
    best = max(history, key=lambda outcome: outcome.rate).point
    assert (best["policy"], best["compile"]) == ("mixed_bfloat16", False)


def test_what_would_not_end_in_time_is_not_tried_and_that_is_said():
    """A step of 2 s at batch 32 takes a trial 8.5 s; larger batches take longer."""
    history = [measured(at(32), 16.0)]
    limits = replace(LIMITS, cheap_seconds=100.0)
    unlimited = next_point(SPACE, BASELINE, history, limits)
    assert isinstance(unlimited, Next)
    assert int(unlimited.point[BATCH]) > 32
    short = next_point(SPACE, BASELINE, history, replace(limits, seconds_left=9.0))
    assert isinstance(short, Next)
    assert int(short.point[BATCH]) <= 32
    assert next_point(SPACE, BASELINE, history, replace(limits, seconds_left=0.9)) == OUT_OF_TIME


def test_a_compiler_is_taken_to_need_what_it_took_before():
    space = replace(SPACE, compile=(False, True))
    history = [measured(at(32), 3200.0), measured(at(32, policy="mixed_bfloat16"), 6400.0)]

    def compiles(history, left):
        tried = list(history)
        limits = replace(LIMITS, seconds_left=left)
        while isinstance(found := next_point(space, BASELINE, tried, limits), Next):
            tried.append(measured(found.point, 3200.0))
            if found.point["compile"]:
                return True
        return False

    assert not compiles(history, SPEED.compile_seconds)
    assert compiles(history, SPEED.compile_seconds + 5.0)
    seen = measured({**at(32), "compile": True}, 3300.0)
    seen = replace(seen, measurement=replace(seen.measurement, warmup_seconds=90.0))
    assert not compiles([*history, seen], SPEED.compile_seconds + 5.0)
