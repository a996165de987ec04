"""The laws that every row in profiles/devices obeys."""

import re
from dataclasses import fields

import pytest

from autoprec.core.device.family import Family, Match, Support
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import DType
from autoprec.hardware.catalogue import matches
from tests.hardware.families import CATALOGUE, FAMILIES, each_family

SIXTEEN = (DType.BFLOAT16, DType.FLOAT16)


@each_family
def test_every_row_has_its_own_source(family):
    assert family.source
    assert all(len(source) > 8 for source in family.source)


@each_family
def test_every_dtype_is_spoken_of(family):
    assert set(family.dtypes) == set(DType)
    assert family.dtypes[DType.FLOAT32].support is Support.NATIVE


@each_family
def test_a_16_bit_dtype_that_is_native_wants_an_alignment(family):
    for dtype in SIXTEEN:
        row = family.dtypes[dtype]
        if row.support is Support.NATIVE:
            assert row.alignment > 1, dtype


@each_family
def test_the_best_alignment_is_a_multiple_of_the_least(family):
    for row in family.dtypes.values():
        assert (row.best_alignment or row.alignment) % row.alignment == 0


@each_family
def test_nothing_is_padded_on_cpus_nor_where_a_compiler_pads(family):
    assert family.padding == (family.kind not in (DeviceKind.CPU, DeviceKind.TPU))


@each_family
def test_on_nvidia_alignments_are_those_of_the_tensor_cores(family):
    wanted = {DType.BFLOAT16: 8, DType.FLOAT16: 8, DType.TF32: 4, DType.FLOAT8: 16}
    if family.kind is DeviceKind.CUDA:
        for dtype, alignment in wanted.items():
            if family.dtypes[dtype].support is Support.NATIVE:
                assert family.dtypes[dtype].alignment == alignment, dtype


@each_family
def test_only_what_runs_in_hardware_has_a_peak(family):
    for dtype, row in family.dtypes.items():
        if row.peak_dense_tflops is not None:
            assert row.support is Support.NATIVE, dtype


@each_family
def test_fewer_bits_are_never_slower_where_both_peaks_are_known(family):
    peaks = {dtype: row.peak_dense_tflops for dtype, row in family.dtypes.items()}
    order = (DType.FLOAT32, DType.TF32, DType.FLOAT16, DType.FLOAT8)
    known = [peaks[dtype] for dtype in order if peaks[dtype] is not None]
    assert known == sorted(known)


@each_family
def test_what_is_emulated_says_why(family):
    if family.name.startswith("generic"):
        return
    for dtype in SIXTEEN:
        row = family.dtypes[dtype]
        if row.support in (Support.EMULATED, Support.ABSENT):
            assert row.reason, dtype


@each_family
def test_a_processor_without_bfloat16_is_not_known_by_its_number_alone(family):
    """A hypervisor may show the number of a model that has less than the processor behind it."""
    row = family.dtypes[DType.BFLOAT16]
    if family.match.cpu_family and row.support is Support.EMULATED:
        assert {"amx_bf16", "avx512_bf16"} <= set(family.match.lacks)


@each_family
def test_a_family_wants_at_least_what_its_parent_wants(family):
    if not family.ancestors:
        assert family.name == "generic-" + family.kind.value
        return
    parent = FAMILIES[family.ancestors[0]]
    assert family.kind is parent.kind
    assert set(parent.match.features) <= set(family.match.features)
    for condition in fields(Match):
        if getattr(parent.match, condition.name):
            assert getattr(family.match, condition.name)


@each_family
def test_a_family_narrows_its_parents_conditions(family):
    """A child's list of equals is a part of its parent's; otherwise it would be no child."""
    if family.ancestors:
        parent = FAMILIES[family.ancestors[0]].match
        for name in ("architecture", "pci", "vendor"):
            wider = getattr(parent, name)
            assert not wider or set(getattr(family.match, name)) <= set(wider), name
        for capability in family.match.compute_capability:
            seen = Observation(family.kind, compute_capability=capability.removesuffix("-"))
            wider = Match(compute_capability=parent.compute_capability)
            assert matches(Family("parent", family.kind, "", (), wider), seen)


@each_family
def test_patterns_are_regular_expressions(family):
    for pattern in (*family.match.name, *family.match.board):
        re.compile(pattern)


@each_family
def test_two_siblings_never_fit_equally(family):
    def conditions(other):
        return (other.kind, len(other.ancestors), other.match)

    twins = [o for o in FAMILIES.values() if conditions(o) == conditions(family)]
    assert twins == [family]


def test_a_generic_row_stands_for_each_kind():
    for kind in DeviceKind:
        assert CATALOGUE.family_of(Observation(kind)).name == f"generic-{kind.value}"


@pytest.mark.parametrize("name", ["nvidia-p100-pcie-16gb", "nvidia-p40", "nvidia-v100-sxm2"])
def test_what_current_wheels_leave_out_says_so_on_every_product(name):
    assert "CUDA 12.6" in FAMILIES[name].note


def test_everything_the_catalogue_must_know_is_there():
    capabilities = {c for f in FAMILIES.values() for c in f.match.compute_capability}
    assert capabilities >= {"6.0", "6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}
    names = " ".join(FAMILIES)
    for part in (
        *(f"amd-cdna{i}" for i in range(1, 5)),
        *(f"amd-rdna{i}" for i in range(2, 5)),
        *(f"amd-zen{i}" for i in range(2, 7)),
        *(f"apple-m{i}" for i in range(1, 6)),
        *(f"tpu-v{i}" for i in ("2", "3", "4", "5e", "5p", "6e", "7x")),
        *(f"arm-neoverse-{i}" for i in ("n1", "n2", "v1", "v2")),
        *(f"arm-graviton{i}" for i in (2, 3, 4, 5)),
        *("intel-skylake-sp", "intel-cooper-lake", "intel-granite-rapids", "intel-xe-hpc"),
    ):
        assert part in names, part


def test_a_law_that_one_family_breaks_fails_and_names_it():
    @each_family
    def law(family):
        assert family.name != "tpu-v5e"

    with pytest.raises(AssertionError) as caught:
        law()
    assert caught.value.__notes__ == ["of tpu-v5e"]
