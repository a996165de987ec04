"""What must hold of devices that are asked for by name and need not be here."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.device.facts import Evidence
from autoprec.core.device.family import Support
from autoprec.core.device.merging import merge
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import propose
from autoprec.core.dtypes import DType, Policy
from autoprec.errors import UsageError
from autoprec.hardware.name_lookup import find_families, hypothetical_observation, resolve_family
from tests.hardware.families import CATALOGUE, FAMILIES, each_family


def names(text):
    return [family.name for family in find_families(CATALOGUE, text)]


@each_family
def test_a_family_is_found_by_its_name_and_by_its_title(family):
    assert family.name in names(family.name)
    assert family.name in names(family.title.upper())


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("h100", "nvidia-h100"),
        ("A100", "nvidia-a100"),
        ("v100", "nvidia-v100"),
        ("nvidia t4", "nvidia-t4"),
        ("RTX 4090", "nvidia-rtx-4090"),
        ("rtx4090", "nvidia-rtx-4090"),
        ("tpu v5e", "tpu-v5e"),
        ("m4", "apple-m4"),
        ("M4 Max", "apple-m4-max"),
        ("zen 4", "amd-zen4"),
        ("mi300x", "amd-mi300x"),
        ("graviton 3", "arm-graviton3"),
        ("sapphire rapids", "intel-sapphire-rapids"),
        ("gfx942", "amd-cdna3"),
        ("h100 sxm", "nvidia-h100-sxm"),
        ("geforce 40", "nvidia-geforce-40"),
        ("h100 80gb hbm3", "nvidia-h100-sxm"),
        ("Tesla T4", "nvidia-t4"),
        ("Tesla V100-SXM2-16GB", "nvidia-v100-sxm2"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"),
        ("gtx 1080", "nvidia-geforce-10"),
        ("titan v", "nvidia-titan-v"),
        ("rtx 2070 super", "nvidia-geforce-20"),
        ("jetson orin", "nvidia-jetson-orin"),
        ("strix halo", "amd-rdna3-5"),
    ],
)
def test_what_people_call_a_device_names_one_family(text, family):
    assert names(text) == [family]
    assert resolve_family(CATALOGUE, text).name == family


def test_words_that_fit_several_are_listed_and_the_choice_is_left_to_the_user():
    assert {"nvidia-h100-pcie", "nvidia-a100-pcie-40gb"} <= set(names("pcie"))
    with pytest.raises(UsageError) as caught:
        resolve_family(CATALOGUE, "pcie")
    assert "device 'pcie' matches 7 families" in str(caught.value)
    assert "\n  nvidia-h100-pcie: NVIDIA H100 PCIe" in str(caught.value)


def test_a_long_list_is_cut_and_counted():
    with pytest.raises(UsageError, match=r"and \d+ more$"):
        resolve_family(CATALOGUE, "nvidia")


@pytest.mark.parametrize(
    ("text", "near"), [("h1000", "nvidia-h100"), ("mi300z", "amd-mi300"), ("tpu v9e", "tpu-v5e")]
)
def test_an_unknown_name_is_answered_with_the_nearest(text, near):
    assert names(text) == []
    with pytest.raises(UsageError, match=f"did you mean .*{near}"):
        resolve_family(CATALOGUE, text)


@pytest.mark.parametrize("text", ["gaudi 3", "AWS Trainium", "inferentia"])
def test_an_accelerator_with_a_stack_of_its_own_is_told_of_with_it(text):
    with pytest.raises(UsageError, match=r"does not tune .*(Gaudi software|Neuron SDK)"):
        resolve_family(CATALOGUE, text)


@pytest.mark.parametrize("text", ["", " - ", "\x1b[2J", "zzzzzzzz"])
def test_what_names_nothing_is_refused_in_one_printable_line(text):
    with pytest.raises(UsageError, match="unknown device") as caught:
        resolve_family(CATALOGUE, text)
    assert str(caught.value).isprintable()


@each_family
def test_a_device_that_is_not_here_is_known_by_the_catalogue_alone(family):
    facts = merge(hypothetical_observation(family), family)
    assert (facts.kind, facts.family, facts.name) == (family.kind, family.name, family.title)
    assert {facts.fact(dtype).evidence for dtype in DType} == {Evidence.CATALOGUE}
    assert "not in this machine: known from the catalogue" in facts.notes[0]
    assert facts.memory_bandwidth_gbps == family.memory_bandwidth_gbps


@each_family
def test_every_processor_family_tells_what_its_processors_can_do(family):
    """A row that names one sort of processor says whether that has what its dtypes require."""
    if family.kind is not DeviceKind.CPU or family.name in ("generic-x86", "generic-arm"):
        return
    facts = merge(hypothetical_observation(family), family)
    wanted = [row for row in family.dtypes.values() if row.requires]
    if family.name != "apple-cpu":
        assert not wanted or facts.observation.features


@pytest.mark.parametrize(
    ("text", "bfloat16", "policy"),
    [
        ("sapphire rapids", Support.NATIVE, Policy.MIXED_BFLOAT16),
        ("zen 4", Support.NATIVE, Policy.MIXED_BFLOAT16),
        ("zen 3", Support.EMULATED, Policy.FLOAT32),
        ("graviton 2", Support.EMULATED, Policy.FLOAT32),
        ("graviton 3", Support.NATIVE, Policy.MIXED_BFLOAT16),
        ("x86-64 cpu", Support.UNKNOWN, Policy.FLOAT32),
        ("t4", Support.EMULATED, Policy.MIXED_FLOAT16),
        ("a100", Support.NATIVE, Policy.MIXED_BFLOAT16),
    ],
)
def test_the_rules_decide_for_it_as_for_a_device_that_is_here(text, bfloat16, policy):
    family = resolve_family(CATALOGUE, text)
    facts = merge(hypothetical_observation(family), family)
    assert facts.fact(DType.BFLOAT16).support is bfloat16
    assert propose(facts).recommended is policy


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=40))
def test_any_text_is_answered_with_families_or_none(text):
    assert all(FAMILIES[name] for name in names(text))
