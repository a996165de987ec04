"""What outcomes rule out, and where the baseline settles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.feasibility import (
    fitting_baseline,
    is_within_reach,
    outpaces_loader,
    why_ruled_out,
    with_room_to_grow,
)
from autoprec.core.speed.space import BATCH, Space
from autoprec.core.speed.trial_results import (
    Outcome,
    Status,
)
from tests.core.speed.machines import (
    SPACE,
    at,
    machines,
    measured,
)

GROWING = [Status.OUT_OF_MEMORY, Status.WOULD_NOT_FIT, Status.TIMEOUT, Status.KILLED]


@pytest.mark.parametrize("status", GROWING)
def test_what_grows_worse_rules_out_the_same_and_larger_batches_of_its_arm(status):
    history = [Outcome(at(64), status)]
    assert why_ruled_out(at(64), history, None) == f"batch 64 ended with {status}"
    assert why_ruled_out(at(128), history, None)
    assert not why_ruled_out(at(32), history, None)
    assert not why_ruled_out(at(128, "mixed_bfloat16"), history, None)
    assert not why_ruled_out(at(128, memory_format="channels_last"), history, None)


@pytest.mark.parametrize("status", GROWING)
def test_what_is_padded_needs_no_less(status):
    plain, padded = {**at(64), "alignment": 1}, {**at(64), "alignment": 8}
    assert why_ruled_out(padded, [Outcome(plain, status)], None)
    assert not why_ruled_out(plain, [Outcome(padded, status)], None)
    assert not why_ruled_out({**padded, BATCH: 32}, [Outcome(plain, status)], None)


@pytest.mark.parametrize("status", [Status.UNSUPPORTED, Status.CRASHED])
def test_what_cannot_run_rules_out_its_whole_arm(status):
    history = [Outcome(at(64), status, reason="no such kernel"), Outcome(at(32), Status.TIMEOUT)]
    assert why_ruled_out(at(8), history, None) == "no such kernel"
    assert why_ruled_out(at(8), [Outcome(at(64), status)], None) == status
    assert not why_ruled_out(at(64, "mixed_float16"), history, None)


@pytest.mark.parametrize("status", [Status.UNSUPPORTED, Status.CRASHED])
@pytest.mark.parametrize(
    ("failed", "out", "open_"), [(64, [64, 128], [8, 16]), (8, [8], [16, 64, 128])]
)
def test_where_an_arm_has_run_a_failure_counts_further_from_there(status, failed, out, open_):
    history = [measured(at(32), 1000), Outcome(at(failed), status, reason="why")]
    assert [why_ruled_out(at(batch), history, None) for batch in out] == ["why"] * len(out)
    assert [why_ruled_out(at(batch), history, None) for batch in open_] == [""] * len(open_)
    assert why_ruled_out(at(failed, "mixed_float16"), history, None) == ""


def test_a_failure_between_batches_that_ran_counts_there_alone():
    history = [measured(at(8), 500), measured(at(128), 2000), Outcome(at(32), Status.UNSUPPORTED)]
    assert [bool(why_ruled_out(at(b), history, None)) for b in (16, 32, 64)] == [
        False,
        True,
        False,
    ]


def test_a_recipe_of_less_than_a_sample_per_second_ran_too():
    history = [measured(at(32), 0.5), Outcome(at(64), Status.UNSUPPORTED)]
    assert not why_ruled_out(at(16), history, None)


def test_a_batch_is_within_reach_of_eight_times_what_ran_with_its_policy_if_any():
    history = [
        measured(at(8), 100.0),
        measured(at(64, "mixed_bfloat16"), 0.5),
        Outcome(at(64), Status.TIMEOUT),
    ]
    for policy, largest in (("float32", 64), ("mixed_bfloat16", 512), ("mixed_float16", 512)):
        assert is_within_reach(at(largest, policy), history)
        assert not is_within_reach(at(largest + 1, policy), history)
    assert is_within_reach(at(4096), [])


def test_larger_batches_than_the_loader_feeds_are_pointless_unless_they_are_fed_faster():
    def fed(batch, rate, loader, policy="float32"):
        outcome = measured(at(batch, policy), rate)
        assert outcome.measurement is not None
        seconds = batch / loader
        return replace(outcome, measurement=replace(outcome.measurement, data_seconds=seconds))

    slow = [fed(32, 100, 90), fed(64, 200, 92)]
    assert outpaces_loader(at(128), slow)
    assert outpaces_loader(at(64), slow)
    assert not outpaces_loader(at(32), slow)
    assert not outpaces_loader(at(128, "mixed_bfloat16"), slow), "it may be slower than the loader"
    growing = [fed(32, 100, 90), fed(64, 200, 170)]
    assert not outpaces_loader(at(64), growing)
    assert not outpaces_loader(at(128), growing), "it may feed still more"
    assert outpaces_loader(at(256), [*growing, fed(128, 300, 172)])
    assert not outpaces_loader(at(128), [fed(32, 100, 90)])
    assert not outpaces_loader(at(128), [fed(32, 100, 110), measured(at(64), 200)])


def test_data_that_are_too_short_rule_out_larger_batches_everywhere():
    history = [Outcome(at(64), Status.SHORT_DATA)]
    assert why_ruled_out(at(64, "tf32"), history, None) == (
        "the data hold fewer than 64 samples a batch"
    )
    assert not why_ruled_out(at(32, "tf32"), history, None)


def test_what_would_not_fit_is_ruled_out_with_the_numbers():
    gib = 2**30
    history = [measured(at(32), 100, peak=4 * gib), measured(at(64), 100, peak=8 * gib)]
    budget = 10 * gib
    assert why_ruled_out(at(128), history, budget) == (
        "would need about 17.6 GiB of the 10.0 GiB available"
    )
    assert not why_ruled_out(at(64), history, budget)
    assert not why_ruled_out(at(128), history, None)
    assert not why_ruled_out(at(128), [measured(at(32), 100)], budget)
    assert not why_ruled_out(at(64), history, 8 * gib)  # just so much
    unknown = [history[0], measured(at(64), 100, peak=0)]
    assert why_ruled_out(at(128), unknown, budget) == why_ruled_out(at(128), history, budget)


def test_what_keeps_freed_memory_may_be_foreseen_at_half_of_it():
    gib = 2**30
    history = [measured(at(32), 100, peak=4 * gib), measured(at(64), 100, peak=8 * gib)]
    kept = [replace(each, point={**each.point, "keep_memory": True}) for each in history]
    assert not why_ruled_out({**at(64), "keep_memory": True}, kept, 16 * gib)
    assert why_ruled_out({**at(64), "keep_memory": True}, kept, 15 * gib) == (
        "would need about 8.0 GiB, more than 7.5 of the 15.0 GiB available: if freed memory is "
        "kept, it may grow in a long training"
    )
    assert not why_ruled_out(at(64), history, 15 * gib)


def test_a_trial_that_kept_more_than_half_of_the_memory_does_not_count_as_run():
    gib = 2**30
    plain = measured(at(64), 100, peak=8 * gib)
    kept = replace(plain, point={**plain.point, "keep_memory": True})
    assert with_room_to_grow(kept, 16 * gib) == kept
    assert with_room_to_grow(kept, None) == kept
    assert with_room_to_grow(plain, 8 * gib) == plain
    crowded = with_room_to_grow(kept, 15 * gib)
    assert (crowded.status, crowded.rate) == (Status.WOULD_NOT_FIT, 0.0)
    assert crowded.reason == (
        "took 8.0 GiB, more than 7.5 of the 15.0 GiB available: if freed memory is kept, it "
        "may grow in a long training"
    )
    assert not why_ruled_out({**at(32), "keep_memory": True}, [crowded], 15 * gib)
    assert why_ruled_out({**at(128), "keep_memory": True}, [crowded], 15 * gib)


@pytest.mark.parametrize("peak", [9, 17])
def test_a_trial_without_kept_memory_or_that_failed_stays_as_it_is(peak):
    plain = measured(at(64), 100, peak=peak * 2**30)
    assert with_room_to_grow(plain, 16 * 2**30) == plain
    failed = Outcome({**at(64), "keep_memory": True}, Status.OUT_OF_MEMORY, reason="no memory")
    assert with_room_to_grow(failed, 16 * 2**30) == failed


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SPACE.points()), machines, st.integers(1, 10**4))
def test_less_memory_never_lets_more_run(point, machine, memory):
    history = [machine.run(at(batch)) for batch in (8, 16)]
    if why_ruled_out(point, history, memory):
        assert why_ruled_out(point, history, memory / 2)


def test_the_baseline_settles_at_the_largest_batch_that_fits() -> None:
    space = Space((Policy.FLOAT32,), (8, 16, 32, 64))
    start = space.point(Recipe(batch_size=32))

    def ended(batch: int, status: Status) -> Outcome:
        return Outcome({**start, BATCH: batch}, status)

    assert fitting_baseline(space, start, []) == start
    full = ended(32, Status.OUT_OF_MEMORY)
    assert fitting_baseline(space, start, [full]) == {**start, BATCH: 16}
    fits = replace(
        ended(16, Status.OK), measurement=Measurement(1.0, 1.0, 1.0, 5, samples_per_step=16)
    )
    assert fitting_baseline(space, start, [full, fits]) == {**start, BATCH: 16}
    slow = replace(fits, measurement=Measurement(99.0, 99.0, 99.0, 5, samples_per_step=16))
    assert fitting_baseline(space, start, [full, slow]) == {**start, BATCH: 16}
    everywhere = [ended(batch, Status.KILLED) for batch in (32, 16, 8)]
    assert fitting_baseline(space, start, everywhere) is None
    assert fitting_baseline(space, start, [ended(32, Status.CRASHED)]) is None
