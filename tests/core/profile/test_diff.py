"""What differs between two profiles."""

from __future__ import annotations

from dataclasses import replace

from autoprec.core.profile.diff import Difference, compare_profiles
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Distributed
from tests.fuzz.example import FULL, PLAIN_FLOAT32


def test_a_profile_and_itself_do_not_differ() -> None:
    found = compare_profiles(FULL, FULL)
    assert found.same_recipe
    assert (*found.task, *found.device, *found.software, *found.claims) == ()


def test_each_subject_names_its_keys_and_both_values() -> None:
    scale = replace(FULL.recipe.loss_scale, initial=2048.0)
    evidence = replace(FULL.evidence, speedup=Ratio(1.5, 1.4, 1.6, 6))
    other = replace(
        FULL,
        recipe=replace(FULL.recipe, loss_scale=scale, batch_size=128),
        software={"python": "3.11.7", "torch": "2.14.0", "cuda": "13"},
        evidence=evidence,
    )
    found = compare_profiles(FULL, other)
    assert not found.same_recipe
    assert set(found.recipe) == {
        Difference("batch_size", 256, 128),
        Difference("loss_scale.initial", 1024.0, 2048.0),
    }
    assert set(found.software) == {
        Difference("torch", "2.13.0", "2.14.0"),
        Difference("cuda", None, "13"),
    }
    assert Difference("speedup.ratio", 2.0, 1.5) in found.claims
    assert found.device == ()


def test_that_one_is_inconclusive_is_among_the_claims() -> None:
    evidence = replace(FULL.evidence, inconclusive="")
    found = compare_profiles(replace(FULL, evidence=evidence), FULL)
    assert found.claims == (Difference("inconclusive", None, FULL.evidence.inconclusive),)


def test_what_only_one_has_is_a_difference() -> None:
    ranks = replace(FULL, recipe=replace(FULL.recipe, distributed=Distributed("ddp", 2)))
    assert Difference("distributed.world_size", None, 2) in compare_profiles(FULL, ranks).recipe
    keys = {each.key for each in compare_profiles(FULL, PLAIN_FLOAT32).recipe}
    assert {"policy", "loss_scale.initial", "knobs.threads"} <= keys
