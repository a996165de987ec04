"""What a finished tuning's numbers become in its profile: which claim, and whose number it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import Refusal
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Kernel, Measurement
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import NOT_COMPARED, REHEARSAL_NOTE, Profile
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.speed.selection import Choice
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.options import Options
from autoprec.tuning.profile.builder import build_profile
from autoprec.tuning.stage_results import REFERENCE, ProvenRecipe, TuningResult
from autoprec.workers.task_source import TaskSource
from tests.tuning.fake_results import BFLOAT16, SPACE, TASK, found, timed, with_confirmation

EQUAL = Verdict(verdict="equal", reason="trains like float32")
GAIN = Ratio(1.98765432, 1.9, 2.1, 6)


def on_device(result: TuningResult, **facts: Any) -> TuningResult:
    """The result of a device whose bfloat16 products reach 2 GFLOPS, and float32's 1."""
    known = {
        "kind": "cpu",
        "name": "any",
        "family": "any",
        "fingerprint": None,
        "measured_memory_bandwidth_gbps": None,
        "disturbed": False,
        "observation": SimpleNamespace(rehearsal=False),
        "fact": lambda dtype: SimpleNamespace(measured_gflops=64 / dtype.limits.bits / 2),
        **facts,
    }
    preflight = replace(result.preflight, facts=cast(Any, SimpleNamespace(**known)))
    return replace(result, preflight=preflight)


def profile_of(result: TuningResult, *, devices: int = 1, float32_allowed: bool = True) -> Profile:
    job = SimpleNamespace(
        float32_allowed=float32_allowed,
        devices=(None,) * devices,
        checkpoint=None,
        memory_bytes=None,
        task=TaskSource(Path("model.py")),
        options=Options(),
    )
    return build_profile(cast(Any, job), result, digest="0" * 64, seconds=1.0)


def won(*history: Outcome, recipe: Recipe = BFLOAT16, **confirmed: Any) -> TuningResult:
    """A tuning in which this recipe was proven and chosen."""
    trial = Outcome(SPACE.point(recipe), Status.OK, timed(0.05))
    result = found(trial, *history)
    proven = ProvenRecipe(recipe, EQUAL, 640.0, 0.05)
    choice = Choice(recipe, GAIN, "")
    fields = {"choice": choice, "proven": proven, "over_baseline": GAIN, **confirmed}
    return on_device(with_confirmation(result, **fields))


def test_a_winners_claims_are_those_of_the_confirmation_and_its_proof() -> None:
    evidence = profile_of(won()).evidence
    assert evidence.speedup == replace(GAIN, ratio=1.9877)
    assert evidence.throughput is None  # its batch is the baseline's
    assert evidence.parity == EQUAL
    assert evidence.reason.startswith(
        "mixed_bfloat16 at batch 32, over float32 as it was run, reaches 1.99x (1.90-2.10, "
        "6 rounds) and trains like float32; "
    )
    assert (evidence.baseline.step_seconds, evidence.chosen.step_seconds) == (0.1, 0.05)


def test_the_batch_is_an_answer_of_its_own() -> None:
    small = replace(BFLOAT16, batch_size=16)
    slow = Outcome(SPACE.point(small), Status.OK, timed(0.025))
    batch = profile_of(won(slow)).evidence.batch
    assert batch is not None
    assert (batch.yours, batch.chosen, batch.rule) == (32, 32, "knee")
    assert (batch.knee, batch.fits, batch.loader_feeds) == (16, 32, None)
    alone = profile_of(won()).evidence.batch
    assert alone is not None
    assert (alone.knee, alone.fits) == (None, 32)


def test_the_loaders_pace_is_kept_in_samples_a_second() -> None:
    result = with_confirmation(won(), measured={BFLOAT16.key(): (timed(0.05, data_seconds=0.2),)})
    batch = profile_of(result).evidence.batch
    assert batch is not None
    assert batch.loader_feeds == 160.0


def test_a_task_of_16_bit_weights_is_no_float32_in_its_profile() -> None:
    result = won()
    low = replace(result.preflight, task=replace(TASK, weights_in="bfloat16"))
    evidence = profile_of(replace(result, preflight=low)).evidence
    assert evidence.baseline.weights_in == "bfloat16"
    assert evidence.reason.startswith(
        "mixed_bfloat16 at batch 32, over the model as it is, in bfloat16, reaches 1.99x (1.90-2.10"
    )


def test_float32_says_what_its_convolutions_ran_in_where_the_device_has_that() -> None:
    result = won()
    task = replace(TASK, convolutions_in="TF32")
    for support, said in ((Support.NATIVE, "TF32"), (Support.ABSENT, "")):
        known = SimpleNamespace(support=support, measured_gflops=1.0)
        own = on_device(result, fact=lambda dtype, known=known: known)
        profile = profile_of(replace(own, preflight=replace(own.preflight, task=task)))
        assert profile.evidence.baseline.convolutions_in == said
        named = "float32 (convolutions in TF32), batch" if said else "float32, batch"
        assert profile.describe_baseline().startswith(named)


@pytest.mark.parametrize("inconclusive", ["", "too wide"])
def test_what_is_kept_of_such_a_task_is_no_float32_either(inconclusive: str) -> None:
    result = with_confirmation(on_device(found()), inconclusive=inconclusive)
    low = replace(result.preflight, task=replace(TASK, weights_in="bfloat16"))
    said = profile_of(replace(result, preflight=low)).evidence.reason
    kept = "too wide; the model is kept as it is" if inconclusive else "own bfloat16 at batch"
    assert kept in said
    assert "float32 " not in said


def test_where_nothing_was_proven_no_speed_is_claimed() -> None:
    result = with_confirmation(found(), over_baseline=GAIN, at_same_batch=GAIN)
    profile = profile_of(on_device(result))
    assert profile.recipe.policy is Policy.FLOAT32
    assert profile.evidence.speedup == NOT_COMPARED
    assert profile.evidence.throughput is None
    assert profile.evidence.parity == REFERENCE


def test_float32s_reason_is_what_was_ruled_out_and_first_what_came_closest() -> None:
    result = on_device(found())
    ruled_out = ("a", "first"), ("b", "second"), ("c", "third")
    refusals = tuple(Refusal(*each) for each in ruled_out)
    result = replace(result, preflight=replace(result.preflight, refusals=refusals))
    assert profile_of(result).evidence.reason.startswith(
        "float32 at batch 32: a: first; b: second; the step takes"
    )
    checked = replace(result.proof, refusals=(Refusal("d", "no time was left"),))
    assert profile_of(replace(result, proof=checked)).evidence.reason.startswith(
        "float32 at batch 32: d: no time was left; a: first; the step takes"
    )


@pytest.mark.parametrize("proven", [True, False])
def test_an_inconclusive_result_says_so_first_and_what_was_kept(proven: bool) -> None:
    result = won() if proven else on_device(found())
    said = profile_of(with_confirmation(result, inconclusive="too wide")).evidence.reason
    kept = (
        "mixed_bfloat16 at batch 32, over float32 as it was run, reaches"
        if proven
        else "float32 is kept"
    )
    assert said.startswith(f"inconclusive: too wide; {kept}")


@pytest.mark.parametrize("allowed", [True, False])
def test_a_recipe_is_forced_where_float32_could_not_be_chosen(allowed: bool) -> None:
    assert profile_of(won(), float32_allowed=allowed).recipe.forced is not allowed


def test_a_rehearsals_profile_claims_no_time() -> None:
    result = on_device(won(), observation=SimpleNamespace(rehearsal=True))
    evidence = profile_of(result).evidence
    assert evidence.speedup == NOT_COMPARED
    assert evidence.chosen.step_seconds == 0
    assert {each.samples_per_second for each in evidence.tried} == {0.0}
    assert evidence.reason.startswith(REHEARSAL_NOTE)


def test_the_share_of_the_peak_is_that_of_the_policys_dtype_and_of_one_device() -> None:
    """1e6 operations a sample: 32 in 50 ms are 0.64 GFLOPS of 2, in 100 ms 0.32 of 1."""
    task = replace(TASK, flops_per_sample=1e6)

    def share(result: TuningResult, devices: int = 1) -> float | None:
        known = replace(result, preflight=replace(result.preflight, task=task))
        return profile_of(known, devices=devices).evidence.chosen.peak_share

    assert share(won()) == pytest.approx(0.64 / 2)
    assert share(won(), devices=2) == pytest.approx(0.32 / 2)
    assert share(on_device(found())) == pytest.approx(0.32 / 1)
    assert share(on_device(won(), disturbed=True)) is None
    task = replace(task, weights_in="bfloat16")
    assert share(on_device(found())) == pytest.approx(0.32 / 2)


def test_saved_activations_take_half_in_16_bits() -> None:
    task = replace(TASK, trainable_bytes=0, saved_bytes_per_sample=1e6)

    def share(result: TuningResult) -> float | None:
        known = replace(result, preflight=replace(result.preflight, task=task))
        known = on_device(known, measured_memory_bandwidth_gbps=10.0)
        return profile_of(known).evidence.chosen.memory_share

    assert share(won()) == pytest.approx(2 * 32 * 0.5e6 / 10e9 / 0.05)
    assert share(on_device(found())) == pytest.approx(2 * 32 * 1e6 / 10e9 / 0.1)
    task = replace(task, weights_in="bfloat16", saved_bytes_per_sample=0.5e6)
    for result, step in ((won(), 0.05), (on_device(found()), 0.1)):
        assert share(result) == pytest.approx(2 * 32 * 0.5e6 / 10e9 / step)


def test_an_overhead_bound_is_seen_in_the_same_recipe_at_other_batches() -> None:
    def trial(recipe: Recipe, step: float) -> Outcome:
        return Outcome(SPACE.point(recipe), Status.OK, timed(step, samples_per_step=64.0))

    twice = replace(BFLOAT16, batch_size=64)
    flat, linear = trial(twice, 0.051), trial(twice, 0.1)
    assert profile_of(won(flat)).evidence.chosen.bound == "overhead"
    assert profile_of(won(linear)).evidence.chosen.bound == "unknown"
    compiled = trial(replace(twice, compile=True), 0.051)
    float32 = trial(Recipe(batch_size=64), 0.051)
    assert profile_of(won(compiled, float32)).evidence.chosen.bound == "unknown"


def limited(result: TuningResult, **facts: Any) -> str:
    """What limits the chosen recipe's step if the first step showed these facts of the task."""
    task = replace(TASK, **facts)
    known = replace(result, preflight=replace(result.preflight, task=task))
    return profile_of(known).evidence.chosen.bound


def test_launches_limit_a_step_on_devices_that_are_sent_one_kernel_after_another() -> None:
    """3,000 kernels in 50 ms, each some 10 microseconds; compiled, there are fewer."""
    many = (Kernel(0.0, 0.0, 0.0, 3000),)
    gpu = on_device(won(), kind=DeviceKind.CUDA)
    assert limited(gpu, kernels=many) == "launches"
    assert limited(won(), kernels=many) == "unknown"
    assert limited(gpu, kernels=many, compiled=True) == "unknown"
    compiled = on_device(won(recipe=replace(BFLOAT16, compile=True)), kind=DeviceKind.CUDA)
    assert limited(compiled, kernels=many) == "unknown"
    assert limited(gpu, kernels=(replace(many[0], count=1000),)) == "unknown"


def test_an_update_limits_a_step_that_it_takes_half_of() -> None:
    """The step takes 50 ms; when the task was described, all took twice as long."""
    update = {"step_seconds": 0.1, "update_seconds": 0.06}
    assert limited(won(), **update) == "the optimizer's update"
    assert limited(won(), step_seconds=0.1, update_seconds=0.04) == "unknown"
    assert limited(won(), step_seconds=0.02, update_seconds=0.015) == "unknown"
    fused = replace(BFLOAT16, knobs={"fused_optimizer": True})
    assert limited(won(recipe=fused), **update) == "unknown"


def test_an_operator_that_was_slow_in_float32_says_nothing_of_16_bits() -> None:
    slow = {"slow_operator": "aten.cumsum", "slow_operator_share": 0.9}
    assert limited(won(), **slow) == "unknown"
    assert limited(on_device(found()), **slow) == "the operator aten.cumsum"


def test_ranks_share_the_samples_of_every_batch_that_an_overhead_is_seen_in() -> None:
    larger = replace(BFLOAT16, batch_size=128)
    trial = Outcome(SPACE.point(larger), Status.OK, timed(0.2, samples_per_step=128.0))
    assert profile_of(won(trial), devices=2).evidence.chosen.bound == "unknown"


def test_the_wait_for_other_ranks_is_the_trials_where_that_measured_it() -> None:
    waits = Ratio(0.123456, 0.1, 0.2, 6)

    def chosen(of_trial: Ratio | None, of_rounds: Ratio | None) -> Ratio | None:
        def measured(wait: Ratio | None) -> Measurement:
            return timed(0.05, exposed_communication=wait)

        result = won()
        point = SPACE.point(BFLOAT16)
        history = (
            result.trials.history[0],
            Outcome(point, Status.OK, measured(of_trial)),
        )
        trials = replace(result.trials, history=history)
        result = replace(result, search=replace(result.search, trials=trials))
        rounds = {BFLOAT16.key(): [measured(of_rounds)]}
        result = with_confirmation(result, measured=rounds)
        return profile_of(result).evidence.chosen.exposed_communication

    assert chosen(None, None) is None
    assert chosen(waits, replace(waits, ratio=0.5)) == replace(waits, ratio=0.1235)
    assert chosen(None, waits) == replace(waits, ratio=0.1235)


def test_of_what_failed_the_profile_keeps_the_beginning_of_the_reason() -> None:
    point = SPACE.point(replace(BFLOAT16, batch_size=64))
    failed = Outcome(point, Status.UNSUPPORTED, None, "no kernel " + "x" * 200)
    told = profile_of(won(failed)).evidence.tried[-1]
    assert told.status is Status.UNSUPPORTED
    assert told.reason == ("no kernel " + "x" * 200)[:120]
    assert told.samples_per_second == 0
