"""A profile is believed only where it was made, and another framework gets what carries over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz.values import recipes
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import Policy
from autoprec.core.profile import TriedRecipe
from autoprec.core.profile.fit import Fit, carry_over, check_fit, minor_version, select_profile
from tests.core.example_profile import HERE, PROFILE, SOFTWARE

fingerprints = st.builds(
    Fingerprint,
    st.sampled_from([DeviceKind.CPU, DeviceKind.CUDA]),
    st.sampled_from(["amd-zen4", "nvidia-hopper", ""]),
    st.sampled_from(["AMD EPYC", "H200", ""]),
    st.integers(0, 200),
    st.none() | st.floats(0.5, 8),
)


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
    assert select_profile(fits) == "3g.20gb"
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
    assert all(f"setting {name} " in told for name in set(recipe.knobs) - set(kept.knobs))


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
    assert (chosen is None) == (not matching)
    if chosen is not None:
        fewest = min(len(each.warnings) for each in matching.values())
        best = [name for name, each in matching.items() if len(each.warnings) == fewest]
        assert chosen == min(best)


@given(fits, st.randoms())
def test_the_order_of_the_profiles_does_not_matter(candidates, shuffler):
    names = list(candidates)
    shuffler.shuffle(names)
    assert select_profile({name: candidates[name] for name in names}) == select_profile(candidates)


INCONCLUSIVE = replace(PROFILE, evidence=replace(PROFILE.evidence, inconclusive="two paces"))


def test_an_inconclusive_tuning_is_said_with_what_was_kept_and_what_to_do():
    plain = replace(PROFILE.recipe.with_policy(Policy.FLOAT32), forced=False)
    for recipe, kept in (
        (plain, "float32 was kept"),
        (replace(plain, forced=True), "what float32 gains is not known"),
        (PROFILE.recipe, f"what {PROFILE.recipe.policy} gains is not known"),
    ):
        found = check_fit(replace(INCONCLUSIVE, recipe=recipe), HERE, SOFTWARE)
        assert found.matches
        assert found.inconclusive == "two paces"
        (said,) = found.warnings
        assert f"was inconclusive: {kept}, because two paces" in said
        assert f"idle machine: `autoprec tune {PROFILE.task.file} --fresh`" in said


def test_a_tuning_that_lacked_time_is_to_be_given_more():
    ran = (TriedRecipe(Policy.FLOAT32, 32),)
    evidence = replace(INCONCLUSIVE.evidence, tried=ran, not_covered=("the rest",))
    (said,) = check_fit(replace(INCONCLUSIVE, evidence=evidence), HERE, SOFTWARE).warnings
    assert said.endswith(f"Give it more time or trials: `autoprec tune {PROFILE.task.file}`")


def test_an_inconclusive_profile_is_selected_only_where_no_other_matches():
    older = {**SOFTWARE, "torch": "0.9"}
    fits = {
        "a": check_fit(INCONCLUSIVE, HERE, SOFTWARE),
        "b": check_fit(replace(PROFILE, software=older), HERE, SOFTWARE),
    }
    assert len(fits["b"].warnings) >= len(fits["a"].warnings)
    assert select_profile(fits) == "b"
    assert select_profile({"a": fits["a"]}) == "a"
