"""What must hold of a profile: it reads back, and it is believed only where it was made."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz.values import profiles, recipes, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import (
    Baseline,
    Chosen,
    DeviceRecord,
    Evidence,
    Fit,
    Profile,
    TaskRecord,
    carry_over,
    check_fit,
    minor_version,
    select_profile,
    without_speeds,
)
from autoprec.core.recipe import Recipe
from autoprec.core.speed.attribution import Part
from autoprec.core.statistics import Ratio

HERE = Fingerprint(DeviceKind.CPU, "amd-zen4", "AMD EPYC", 64, 4.0)
PROFILE = Profile(
    schema=1,
    created="2026-11-20T12:00:00Z",
    autoprec="0.1.0",
    task=TaskRecord("model.py", "0" * 64, "torch"),
    device=DeviceRecord(DeviceKind.CPU, "AMD EPYC", "amd-zen4", HERE),
    software={"python": "3.11.7", "torch": "2.13.0+cpu"},
    recipe=Recipe(Policy.MIXED_BFLOAT16, 512),
    evidence=Evidence(
        baseline=Baseline(Policy.FLOAT32, 32, 100.0, 0.32, 2**30),
        chosen=Chosen(200.0, 2.56, 2**31),
        speedup=Ratio(2.0, 1.9, 2.1, 9),
        speedup_same_batch=None,
        parity=Verdict("equal", "trains like float32"),
        reason="it is fast",
        trials=9,
        tuning_seconds=70.0,
    ),
)
SOFTWARE = dict(PROFILE.software)

fingerprints = st.builds(
    Fingerprint,
    st.sampled_from([DeviceKind.CPU, DeviceKind.CUDA]),
    st.sampled_from(["amd-zen4", "nvidia-hopper", ""]),
    st.sampled_from(["AMD EPYC", "H200", ""]),
    st.integers(0, 200),
    st.none() | st.floats(0.5, 8),
)


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
        (("schema",), 2, "schema: 2 given, expected one of 1"),
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


# Fit ----------------------------------------------------------------------------------------------


def test_a_profile_fits_where_it_was_made():
    assert check_fit(PROFILE, HERE, SOFTWARE, "torch") == Fit()
    assert check_fit(PROFILE, HERE, SOFTWARE).matches


@given(fingerprints, fingerprints)
def test_another_family_or_kind_never_matches_and_the_same_always_does(made, here):
    profile = replace(PROFILE, device=replace(PROFILE.device, fingerprint=made))
    found = check_fit(profile, here, SOFTWARE, "torch")
    assert found.matches == ((made.kind, made.family) == (here.kind, here.family))
    if not found.matches:
        assert found.warnings == ()
    elif made == here:
        assert found == Fit()


def test_a_rehearsals_profile_fits_in_a_rehearsal_only():
    rehearsed = replace(HERE, rehearsal=True)
    profile = replace(PROFILE, device=replace(PROFILE.device, fingerprint=rehearsed))
    assert check_fit(profile, rehearsed, SOFTWARE, "torch") == Fit()
    assert check_fit(profile, HERE, SOFTWARE, "torch").problems == (
        "made in a rehearsal, on a device that was only pretended",
    )
    assert check_fit(PROFILE, rehearsed, SOFTWARE, "torch").matches


def test_a_rehearsals_evidence_keeps_verdicts_and_memory_and_nothing_timed():
    kept = without_speeds(PROFILE.evidence)
    assert kept.parity == PROFILE.evidence.parity
    assert kept.chosen.peak_memory_bytes == PROFILE.evidence.chosen.peak_memory_bytes
    assert {kept.baseline.samples_per_second, kept.chosen.samples_per_second} == {0.0}
    assert (kept.speedup.rounds, kept.speedup_same_batch) == (0, None)
    assert "rehearsal" in kept.reason


def test_what_rules_a_profile_out_is_told_with_both_devices():
    other = Fingerprint(DeviceKind.CUDA, "nvidia-hopper", "H200", 139)
    assert check_fit(PROFILE, other, SOFTWARE).problems == (
        "made on a cpu device, this one is cuda",
    )
    cousin = replace(HERE, family="intel-spr", name="")
    assert check_fit(PROFILE, cousin, SOFTWARE).problems == (
        "made on AMD EPYC (amd-zen4), this device is intel-spr (intel-spr)",
    )


@pytest.mark.parametrize(
    ("change", "warnings"),
    [
        ({"name": "EPYC"}, ("made on 'AMD EPYC', this device calls itself 'EPYC'",)),
        ({"memory_gib": 32}, ("made with 64 GiB of memory, here are 32 GiB",)),
        ({"memory_gib": 58}, ()),
        ({"memory_gib": 0}, ()),  # not known
        ({"partition": ""}, ()),
        ({"core_quota": None}, ("made with a core quota of 4, here it is none",)),
        ({"core_quota": 0.5}, ("made with a core quota of 4, here it is 0.5",)),
    ],
)
def test_another_name_memory_or_quota_is_a_warning(change, warnings):
    found = check_fit(PROFILE, replace(HERE, **change), SOFTWARE, "torch")
    assert found == Fit(warnings=warnings)


def test_parts_of_a_device_are_told_apart():
    """3g.20gb and 4g.20gb of an A100 have its name and the same memory."""
    made = {part: replace(HERE, partition=part) for part in ("3g.20gb", "4g.20gb", "")}
    profiles = {
        part: replace(PROFILE, device=replace(PROFILE.device, fingerprint=each))
        for part, each in made.items()
    }
    here = made["3g.20gb"]
    fits = {part: check_fit(each, here, SOFTWARE, "torch") for part, each in profiles.items()}
    assert select_profile(fits).name == "3g.20gb"
    assert "a part of a device (4g.20gb), this device is a part" in fits["4g.20gb"].warnings[0]
    assert "made on a whole device" in fits[""].warnings[0]


def test_a_profile_from_before_partitions_were_told_still_loads_and_fits():
    plain = {k: v for k, v in to_plain(HERE).items() if k != "partition"}
    old = from_plain(Fingerprint, plain)
    profile = replace(PROFILE, device=replace(PROFILE.device, fingerprint=old))
    for part in ("", "3g.20gb"):
        assert check_fit(profile, replace(HERE, partition=part), SOFTWARE, "torch") == Fit()


@pytest.mark.parametrize(
    ("software", "framework", "warnings"),
    [
        ({"torch": "2.13.1"}, "torch", ()),
        ({"torch": "2.13.0+cu128", "python": "3.13.0"}, "torch", ()),
        ({"torch": "2.14.0"}, "torch", ("made with torch 2.13.0+cpu, here is 2.14.0",)),
        (
            {},
            "keras",
            (
                "tuned with torch, applied to keras: policy and batch carry over, the measured "
                "speed may not",
            ),
        ),
    ],
)
def test_another_framework_or_minor_version_is_a_warning(software, framework, warnings):
    assert check_fit(PROFILE, HERE, software, framework) == Fit(warnings=warnings)


@pytest.mark.parametrize("software", [{}, {"tensorflow": "2.21.0", "keras": "3.15.1"}])
@pytest.mark.parametrize("framework", ["torch", None])
def test_without_its_own_framework_a_profile_does_not_fit(software, framework):
    found = check_fit(PROFILE, HERE, software, framework)
    assert found == Fit(problems=("made with torch 2.13.0+cpu, which is not installed here",))


def test_what_the_framework_stands_on_is_compared_only_where_it_is_installed():
    made = replace(PROFILE, software={**SOFTWARE, "numpy": "2.1.0"})
    assert check_fit(made, HERE, SOFTWARE, "torch") == Fit()
    assert check_fit(made, HERE, {**SOFTWARE, "numpy": "1.26.4"}, "torch").warnings == (
        "made with numpy 2.1.0, here is 1.26.4",
    )


@pytest.mark.parametrize(
    ("version", "minor"),
    [("2.13.0+cpu", "2.13"), ("2.13", "2.13"), ("3", "3"), ("2.13.0rc1", "2.13"), ("", "")],
)
def test_a_minor_version_is_its_first_two_numbers(version, minor):
    assert minor_version(version) == minor


# Another framework --------------------------------------------------------------------------------


KERAS_KNOBS = ("threads", "steps_per_execution")


@given(recipes, st.sampled_from(["torch", "keras"]))
def test_within_its_framework_a_recipe_carries_over_whole(recipe, framework):
    assert carry_over(recipe, framework, framework, ()) == (recipe, ())


@given(recipes)
def test_elsewhere_policy_and_batch_stay_and_what_is_left_out_is_named(recipe):
    kept, notes = carry_over(recipe, "torch", "keras", KERAS_KNOBS)
    assert (kept.policy, kept.effective_batch) == (recipe.policy, recipe.effective_batch)
    assert kept.loss_scale == recipe.loss_scale
    assert kept.knobs.keys() <= set(KERAS_KNOBS)
    told = "; ".join(notes)
    for name in ("float32_modules", "compile", "memory_format"):
        assert (f"{name} " in told) == (getattr(kept, name) != getattr(recipe, name))
    assert ("alignment (" in told) == bool(recipe.alignment.modules)
    assert all(f"knob {name} " in told for name in set(recipe.knobs) - set(kept.knobs))


# Select -------------------------------------------------------------------------------------------

fits = st.dictionaries(
    st.text(max_size=5),
    st.builds(
        Fit,
        st.lists(st.text(), max_size=2).map(tuple),
        st.lists(st.text(), max_size=3).map(tuple),
    ),
    max_size=5,
)


@given(fits)
def test_the_matching_profile_with_the_fewest_warnings_is_selected(candidates):
    chosen = select_profile(candidates)
    matching = {name: each for name, each in candidates.items() if each.matches}
    assert (chosen.name is None) == (not matching)
    assert set(chosen.reasons) == set(candidates) - set(matching)
    if chosen.name is not None:
        fewest = min(len(each.warnings) for each in matching.values())
        best = [name for name, each in matching.items() if len(each.warnings) == fewest]
        assert chosen.name == min(best)


@given(fits, st.randoms())
def test_the_order_of_the_profiles_does_not_matter(candidates, shuffler):
    names = list(candidates)
    shuffler.shuffle(names)
    assert select_profile({name: candidates[name] for name in names}) == select_profile(candidates)


def test_why_a_profile_does_not_fit_is_kept():
    assert select_profile({"a": Fit(("too old", "too slow"))}).reasons == {"a": "too old; too slow"}


def test_its_repr_is_one_line_and_its_html_escapes_what_comes_from_elsewhere():
    parts = (
        Part("precision", Ratio(1.2, 1.1, 1.3, 9), "float32, batch 512"),
        Part("batch", Ratio(1.7, 1.6, 1.8, 9), "float32, batch 32"),
    )
    evidence = replace(PROFILE.evidence, waterfall=parts, warnings=("<script>1</script>",))
    profile = replace(PROFILE, evidence=evidence)
    assert repr(profile) == (
        "<Profile of model.py: mixed_bfloat16, batch 512; 2.00x (1.90-2.10) over float32, batch "
        "32; precision 1.20x, batch 1.70x; equal: trains like float32; AMD EPYC>"
    )
    shown = profile._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "<tr><th>due to</th><td>precision 1.20x, batch 1.70x</td></tr>" in shown


def test_an_inconclusive_profile_says_that_first():
    evidence = replace(
        PROFILE.evidence, inconclusive="it ran at two paces", speedup=Ratio(1.0, 1.0, 1.0, 0)
    )
    shown = repr(replace(PROFILE, recipe=Recipe(), evidence=evidence))
    assert shown.startswith("<Profile of model.py: inconclusive: it ran at two paces; float32, ")
    assert "1.00x" not in shown


def test_a_profile_without_the_newer_names_loads():
    plain = to_plain(PROFILE)
    for name in ("waterfall", "inconclusive", "not_covered"):
        del plain["evidence"][name]
    assert from_plain(Profile, plain) == PROFILE
