"""What must hold of a profile: it reads back, and it shows what matters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz.values import profiles, values_of
from hypothesis import given, settings

from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import (
    Baseline,
    Chosen,
    DeviceRecord,
    Evidence,
    Present,
    Profile,
    TaskRecord,
    without_speeds,
)
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.speed.attribution import Part
from tests.core.example_profile import PROFILE


@settings(max_examples=50)
@given(profiles)
def test_a_profile_reads_back_as_it_was_written(profile):
    assert from_plain(Profile, to_plain(profile)) == profile


@pytest.mark.parametrize(
    "kind", [TaskRecord, DeviceRecord, Baseline, Chosen, Evidence, Verdict, Ratio]
)
def test_its_parts_read_back_as_they_were_written(kind):
    @settings(max_examples=25)
    @given(values_of(kind))
    def check(value):
        assert from_plain(kind, to_plain(value)) == value

    check()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("evidence", "trials"), -1, "evidence.trials: -1 given, expected a number from 0"),
        (("evidence", "tuning_seconds"), 1e10, "evidence.tuning_seconds: "),
        (("evidence", "memory_budget_bytes"), -1, "evidence.memory_budget_bytes: -1 given"),
        (("evidence", "baseline", "batch_size"), 0, "evidence.baseline.batch_size: 0 given"),
        (("evidence", "baseline", "step_seconds"), -0.1, "baseline.step_seconds: -0.1 given"),
        (("evidence", "chosen", "peak_memory_bytes"), 2**61, "chosen.peak_memory_bytes: "),
        (("evidence", "chosen", "peak_share"), -0.5, "chosen.peak_share: -0.5 given"),
        (("evidence", "speedup", "rounds"), -1, "evidence.speedup.rounds: -1 given"),
        (("schema",), 4, "schema: 4 given, expected one of 3"),
        (("recipe", "polcy"), 1, "recipe.polcy: unknown key; did you mean 'policy'"),
    ],
)
def test_numbers_out_of_range_and_unknown_keys_are_refused(path, value, message):
    plain = to_plain(PROFILE)
    place = plain
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(DecodeError, match=message):
        from_plain(Profile, plain)


def test_a_rehearsals_evidence_keeps_verdicts_and_memory_and_nothing_timed():
    kept = without_speeds(PROFILE.evidence)
    assert kept.parity == PROFILE.evidence.parity
    assert kept.chosen.peak_memory_bytes == PROFILE.evidence.chosen.peak_memory_bytes
    assert {kept.baseline.samples_per_second, kept.chosen.samples_per_second} == {0.0}
    assert (kept.speedup.rounds, kept.throughput) == (0, None)
    assert "rehearsal" in kept.reason


def test_its_repr_is_one_line_and_its_html_escapes_what_comes_from_elsewhere():
    parts = (
        Part("precision", Ratio(1.2, 1.1, 1.3, 9), "float32, batch 512"),
        Part("batch", Ratio(1.7, 1.6, 1.8, 9), "float32, batch 32"),
    )
    evidence = replace(PROFILE.evidence, waterfall=parts, warnings=("<script>1</script>",))
    profile = replace(PROFILE, evidence=evidence)
    assert repr(profile) == (
        "<Profile of model.py: mixed_bfloat16, batch 512; 2.00x (1.90-2.10, 9 rounds) the "
        "samples/s of float32, batch 32; precision 1.20x, batch 1.70x; equal: trains like float32; "
        "AMD EPYC>"
    )
    base = replace(evidence.baseline, weights_in="float16")
    low = replace(profile, evidence=replace(evidence, baseline=base))
    assert "the samples/s of the model as it is, in float16, batch 32" in repr(low)
    shown = profile._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "<tr><th>due to</th><td>precision 1.20x, batch 1.70x</td></tr>" in shown


def test_an_inconclusive_profile_says_that_first():
    evidence = replace(PROFILE.evidence, inconclusive="it ran at two paces", throughput=None)
    shown = repr(replace(PROFILE, recipe=Recipe(), evidence=evidence))
    assert shown.startswith("<Profile of model.py: inconclusive: it ran at two paces; float32, ")
    assert "1.00x" not in shown


def test_a_profile_without_the_newer_names_loads():
    plain = to_plain(PROFILE)
    for name in ("waterfall", "inconclusive", "not_covered"):
        del plain["evidence"][name]
    assert from_plain(Profile, plain) == PROFILE


def test_the_gain_over_what_the_user_trains_with_is_told_first_and_judged_last() -> None:
    present = Present(Policy.MIXED_BFLOAT16, Ratio(1.25, 1.2, 1.3, 9))
    profile = replace(PROFILE, evidence=replace(PROFILE.evidence, present=present))
    assert profile.describe_gains() == (
        "1.25x (1.20-1.30, 9 rounds) the samples/s of what you train with, mixed_bfloat16, batch 32"
        "; 2.00x (1.90-2.10, 9 rounds) the samples/s of float32, batch 32"
    )
    assert [gain.name for gain in profile.gains()] == ["throughput", "over yours"]
    assert profile.gains()[-1].rival == Recipe(Policy.MIXED_BFLOAT16, 32)
    assert from_plain(Profile, to_plain(profile)) == profile


def test_a_recipe_that_is_what_the_user_trains_with_is_told_as_such() -> None:
    evidence = replace(PROFILE.evidence, present=Present(Policy.MIXED_BFLOAT16))
    profile = replace(PROFILE, evidence=evidence)
    assert profile.describe_gains().endswith("; it is what you train with already")
    assert len(profile.gains()) == 1


def test_the_command_that_tunes_a_task_again_has_the_scripts_own_arguments():
    script = TaskRecord("train.py", "0", "torch", ("--lr", "1e-3", "a b"), 2)
    assert script.tune_command("--fresh") == (
        "autoprec tune train.py --at 2 --fresh -- --lr 1e-3 'a b'"
    )
    assert PROFILE.task.tune_command() == "autoprec tune model.py"
