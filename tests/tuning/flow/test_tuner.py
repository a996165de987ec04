"""The whole tuning on the simulated backend; workers that die are real processes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.api import tune
from autoprec.core.codec import from_plain, to_plain
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.dtypes import Policy
from autoprec.core.profile import Profile
from autoprec.core.speed.trial_results import Status
from autoprec.errors import NoFeasibleRecipe
from autoprec.profiles import load_profile
from autoprec.tuning.events import Event, Finished, Judged, Note, TrialFinished

pytestmark = pytest.mark.usefixtures("unmeasured", "in_process")

FASTER = (
    "overhead={'float32': .002, 'mixed_bfloat16': .003}, "
    "per_sample={'float32': .0005, 'mixed_bfloat16': .00025}"
)
BOTH = ("float32", "mixed_bfloat16")


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., Path]:
    """Write a simulated task file whose model has these arguments."""

    def write(arguments: str = FASTER, more: str = "") -> Path:
        path = tmp_path / "simulated_task.py"
        path.write_text(
            "from simulated import SimulatedModel\n"
            f"def build_model():\n    return SimulatedModel({arguments})\n"
            f"def build_data(batch_size):\n    return []\n{more}\n"
        )
        return path

    return write


def run(path: Path, **settings: Any) -> tuple[Profile, list[Event]]:
    events: list[Event] = []
    settings = {"rounds": 5, "policies": BOTH, **settings}
    return tune(path, listener=events.append, **settings), events


def trials(events: list[Event]) -> list[TrialFinished]:
    return [event for event in events if isinstance(event, TrialFinished)]


def test_the_fast_policy_that_trains_like_float32_is_chosen_with_its_evidence(
    task: Callable[..., Path],
) -> None:
    path = task()
    profile, events = run(path)
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert profile.evidence.parity.verdict == "equal"
    assert profile.evidence.throughput is not None
    assert profile.evidence.throughput.low > 1.5
    assert profile.evidence.speedup.ratio == pytest.approx(1.96, abs=0.1)
    assert [part.what for part in profile.evidence.waterfall] == ["precision", "batch"]
    whole = math.prod(part.speedup.ratio for part in profile.evidence.waterfall)
    assert whole == pytest.approx(profile.evidence.throughput.ratio, rel=0.05)
    assert profile.evidence.trials == len(trials(events))
    written = load_profile(path.with_suffix(".profile.yaml"))
    assert written == from_plain(Profile, to_plain(profile)) == profile


def test_the_baseline_is_measured_first(task: Callable[..., Path]) -> None:
    _, events = run(task(), trials=2)
    first = trials(events)[0]
    assert (first.recipe.policy, first.recipe.batch_size) == (Policy.FLOAT32, 32)


def test_what_a_compiler_breaks_is_tried_without_it(task: Callable[..., Path]) -> None:
    path = task(f"{FASTER}, compiled=0.4, compiler_breaks=True")
    profile, events = run(path, compile=True, batch_sizes=(32,))
    assert any(event.recipe.compile for event in trials(events))
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert not profile.recipe.compile
    assert "mixed_bfloat16" in {r.candidate for r in profile.evidence.refusals}


def test_a_compiled_float32_that_trains_otherwise_leaves_the_plain_one(
    task: Callable[..., Path],
) -> None:
    """Float32 is the reference: it can never be missing among the answers."""
    path = task("compiled=0.4, compiler_breaks=True")
    profile, _ = run(path, policies=("float32",), compile=True, batch_sizes=(32,))
    assert profile.recipe.policy is Policy.FLOAT32
    assert not profile.recipe.compile


def test_a_policy_that_brings_nothing_is_refused_with_its_number(
    task: Callable[..., Path],
) -> None:
    slow = "per_sample={'float32': .0005, 'mixed_bfloat16': .001}"
    profile, events = run(task(slow))
    assert profile.recipe.policy is Policy.FLOAT32
    reasons = {r.candidate: r.reason for r in profile.evidence.refusals}
    said = re.fullmatch(
        r"measured ([\d.]+)x the speed of the best float32 recipe", reasons["mixed_bfloat16"]
    )
    assert said is not None, reasons
    best = {trial.recipe.policy: 0.0 for trial in trials(events)}
    for trial in trials(events):
        best[trial.recipe.policy] = max(best[trial.recipe.policy], trial.outcome.rate)
    measured = best[Policy.MIXED_BFLOAT16] / best[Policy.FLOAT32]
    assert float(said[1]) == pytest.approx(measured, abs=0.02)
    assert measured == pytest.approx(0.5, abs=0.03)


def test_a_policy_that_breaks_training_is_never_chosen(task: Callable[..., Path]) -> None:
    profile, events = run(task(FASTER + ", broken=('mixed_bfloat16',)"))
    assert profile.recipe.policy is Policy.FLOAT32
    fastest = max(trials(events), key=lambda trial: trial.outcome.rate)
    assert fastest.recipe.policy is Policy.MIXED_BFLOAT16
    judged = [event for event in events if isinstance(event, Judged)]
    assert {event.recipe.policy for event in judged} == {Policy.MIXED_BFLOAT16}
    assert {event.verdict for event in judged} == {"rejected"}
    reasons = {r.candidate: r.reason for r in profile.evidence.refusals}
    said = re.match(r"after 30 steps its loss is (\d+) % away from float32's", judged[0].reason)
    assert said is not None, judged[0]
    assert float(said[1]) == pytest.approx(43, abs=2)
    assert reasons["mixed_bfloat16"].startswith(judged[0].reason)


def test_an_island_makes_a_policy_train_like_float32(task: Callable[..., Path]) -> None:
    profile, _ = run(task(FASTER + ", broken=('mixed_bfloat16',), sensitive_module='norm'"))
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert profile.recipe.float32_modules == ("norm",)
    assert profile.evidence.islands is not None


def test_forced_policies_are_marked_and_none_feasible_is_an_error(
    task: Callable[..., Path],
) -> None:
    profile, _ = run(task(), policies=("mixed_bfloat16",))
    assert profile.recipe.forced
    with pytest.raises(NoFeasibleRecipe, match="no policy that was asked for passes"):
        run(task(FASTER + ", nonfinite=('mixed_bfloat16',)"), policies=("mixed_bfloat16",))


def test_the_effective_batch_is_kept(task: Callable[..., Path]) -> None:
    profile, events = run(task(more="BATCH_SIZE = 128"))
    assert profile.recipe.effective_batch == 128
    assert all(trial.recipe.effective_batch == 128 for trial in trials(events))


def test_a_batch_that_may_not_be_split_stays_whole(task: Callable[..., Path]) -> None:
    path = task(FASTER + ", splittable=False", more="BATCH_SIZE = 128")
    for settings in ({}, {"batch_sizes": "32-128"}):
        _, events = run(path, **settings)
        assert {trial.recipe.batch_size for trial in trials(events)} == {128}


def test_out_of_memory_is_a_result_and_rules_larger_batches_out(
    task: Callable[..., Path],
) -> None:
    profile, events = run(task(FASTER + ", capacity_bytes=420 * 2**20"))
    ended = [trial.outcome.status for trial in trials(events)]
    assert Status.OUT_OF_MEMORY in ended
    assert profile.recipe.batch_size <= 128
    failed = [t.recipe for t in trials(events) if t.outcome.status is Status.OUT_OF_MEMORY]
    sizes = [r.batch_size for r in failed if r.policy is Policy.MIXED_BFLOAT16]
    assert sizes == sorted(set(sizes), reverse=True)


def test_a_recipe_that_would_not_fit_the_budget_is_not_tried(task: Callable[..., Path]) -> None:
    _, events = run(task(), memory_bytes=500 * 2**20)
    assert all(trial.recipe.batch_size <= 256 for trial in trials(events))
    assert all(trial.outcome.status is Status.OK for trial in trials(events))


def test_where_float32_does_not_fit_its_batch_a_smaller_one_is_the_baseline(
    task: Callable[..., Path],
) -> None:
    profile, _ = run(task(FASTER + ", capacity_bytes=300 * 2**20", more="BATCH_SIZE = 256"))
    assert profile.evidence.baseline.batch_size == 64
    assert profile.evidence.baseline.accumulation_steps == 4
    told = "does not fit at batch 256: it is taken at batch 256 in 4 micro-batches of 64"
    assert any(told in text for text in profile.evidence.warnings)


@pytest.mark.usefixtures("real_workers")
def test_where_float32_crashes_there_is_no_baseline(task: Callable[..., Path]) -> None:
    with pytest.raises(NoFeasibleRecipe, match="the baseline does not run"):
        run(task(FASTER + ", crash_at_batch=8"))


@pytest.mark.usefixtures("real_workers")
@pytest.mark.parametrize("fault", ["crash_at_batch=128", "exit_at_batch=128"])
def test_a_trial_that_kills_its_worker_is_a_result(task: Callable[..., Path], fault: str) -> None:
    profile, events = run(task(f"{FASTER}, {fault}"))
    assert Status.CRASHED in [trial.outcome.status for trial in trials(events)]
    assert profile.recipe.batch_size < 128


def test_data_that_hold_fewer_samples_bound_the_batch(task: Callable[..., Path]) -> None:
    profile, _ = run(task(FASTER + ", samples=100"))
    assert profile.recipe.batch_size <= 64


def test_a_finished_study_answers_at_once_and_fresh_starts_over(
    task: Callable[..., Path],
) -> None:
    path = task()
    first, _ = run(path)
    again, events = run(path)
    assert again == first
    assert not trials(events)
    assert any(isinstance(event, Finished) and event.from_study for event in events)
    _, events = run(path, fresh=True)
    assert trials(events)


def test_a_changed_task_starts_a_study_of_its_own(task: Callable[..., Path]) -> None:
    run(task())
    _, events = run(task(FASTER + ", noise=0.02"))
    assert trials(events)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_other_samplers_find_it_too(task: Callable[..., Path], sampler: str) -> None:
    profile, events = run(task(), sampler=sampler, trials=8)
    assert len(trials(events)) == 8
    fastest = max(trials(events), key=lambda trial: trial.outcome.rate).recipe.policy
    assert profile.recipe.policy is fastest, profile.evidence.refusals


def test_the_grid_measures_every_recipe(task: Callable[..., Path]) -> None:
    _, events = run(task(), sampler="grid", batch_sizes="32-128")
    assert len(trials(events)) == 6


def test_products_that_something_disturbed_are_told_before_anything_rests_on_them(
    task: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(facts: DeviceFacts, software: object) -> DeviceFacts:
        return replace(facts, notes=(*facts.notes, "float32 products ran at 1 and at 120 GFLOP/s"))

    monkeypatch.setattr("autoprec.probing.measure_device", measured)
    _, events = run(task(), batch_sizes=(32,), trials=2)
    told = [
        event for event in events if isinstance(event, Note) and "at 1 and at 120" in event.text
    ]
    assert [event.warning for event in told] == [True]
    assert events.index(told[0]) < events.index(trials(events)[0])


def test_a_checkpoint_is_in_the_profile_and_another_one_is_another_study(
    task: Callable[..., Path], tmp_path: Path
) -> None:
    path, weights = task(), tmp_path / "last.pt"
    found = []
    for content in (b"a", b"a", b"b"):
        weights.write_bytes(content)
        profile, events = run(path, checkpoint=str(weights), trials=2, rounds=1)
        recorded = load_profile(path.with_suffix(".profile.yaml")).evidence.checkpoint
        assert recorded == profile.evidence.checkpoint
        assert recorded is not None
        assert recorded.file == "last.pt"
        found.append((recorded.sha256, len(trials(events))))
    assert found[0][0] == found[1][0] != found[2][0]
    assert [done for _, done in found] == [2, 0, 2]
    assert run(path, trials=2, rounds=1)[0].evidence.checkpoint is None


def test_the_gradients_noise_chooses_the_batch_where_goodput_is_wanted(
    task: Callable[..., Path],
) -> None:
    """A step takes 0.003 + 0.00025 b seconds: 128 is best where the scale is 128 ** 2 / 12."""
    profile, events = run(task(f"{FASTER}, gradient_noise=1365.0"), batch="goodput")
    batch = profile.evidence.batch
    assert batch is not None
    assert (batch.rule, batch.yours, batch.chosen) == ("goodput", 32, 128)
    assert batch.knee is not None
    assert batch.knee > 128
    assert batch.noise_scale is not None
    assert batch.noise_scale.at == pytest.approx(1365.0)
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    said = [each.text for each in events if isinstance(each, Note)]
    assert "batch 128 has the most goodput: the gradient noise scale is 1365 samples" in said


def test_where_a_larger_batch_needs_as_many_more_samples_yours_is_kept(
    task: Callable[..., Path],
) -> None:
    profile, _ = run(task(f"{FASTER}, gradient_noise=3.0"), batch="goodput")
    assert profile.recipe.batch_size == 32
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert profile.evidence.throughput is None


def test_where_gradients_do_not_tell_their_noise_the_knee_is_taken(
    task: Callable[..., Path],
) -> None:
    profile, events = run(task(), batch="goodput")
    batch = profile.evidence.batch
    assert batch is not None
    assert batch.chosen == batch.knee
    assert any("could not be measured" in each.text for each in events if isinstance(each, Note))


def test_the_task_file_names_the_policy_of_the_present_training(task: Callable[..., Path]) -> None:
    path = task()
    before, _ = run(path)
    text = path.read_text()
    path.write_text(f'{text}\nBASELINE = "mixed_bfloat16"\n')
    profile, events = run(path)
    assert before.evidence.present is None
    assert profile.evidence.present is not None
    assert profile.evidence.present.policy is Policy.MIXED_BFLOAT16
    assert trials(events) == []  # those before hold, and so do verdicts
    assert not [event for event in events if isinstance(event, Judged)]
    assert profile.task.sha256 == before.task.sha256
    over_float32, _ = run(path, baseline="float32")
    assert over_float32.evidence.present is None
