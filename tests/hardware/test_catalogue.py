"""The laws of the data in profiles/devices, and how strictly it is read."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from autoprec.core.device.facts import (
    UNIFIED_MEMORY_NOTE,
    DeviceKind,
    Family,
    Match,
    Observation,
    Support,
    merge,
)
from autoprec.core.device.policies import propose
from autoprec.core.dtypes import DType, Policy
from autoprec.errors import CatalogueError
from autoprec.hardware.catalogue import load_catalogue, profiles_folder
from autoprec.hardware.matching import matches

CATALOGUE = load_catalogue()
FAMILIES = {family.name: family for family in CATALOGUE.families}
SIXTEEN = (DType.BFLOAT16, DType.FLOAT16)
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


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


@pytest.mark.parametrize(
    ("name", "capability", "family"),
    [
        ("NVIDIA H200", "9.0", "nvidia-h200"),
        ("NVIDIA H200 NVL", "9.0", "nvidia-h200-nvl"),
        ("NVIDIA H20", "9.0", "nvidia-h20"),
        ("NVIDIA H100 NVL", "9.0", "nvidia-h100-nvl"),
        ("NVIDIA L4", "8.9", "nvidia-l4"),
        ("NVIDIA L40", "8.9", "nvidia-l40"),
        ("NVIDIA L40S", "8.9", "nvidia-l40s"),
        ("Tesla T4", "7.5", "nvidia-t4"),
        ("NVIDIA T400", "7.5", "nvidia-turing-gtx16"),
        ("NVIDIA A10", "8.6", "nvidia-a10"),
        ("NVIDIA A10G", "8.6", "nvidia-a10g"),
        ("NVIDIA A100-SXM4-80GB", "8.0", "nvidia-a100-sxm4-80gb"),
        ("NVIDIA A40", "8.6", "nvidia-a40"),
        ("NVIDIA RTX A4000", "8.6", "nvidia-ampere"),
        ("NVIDIA GeForce RTX 4090", "8.9", "nvidia-rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "8.9", "nvidia-geforce-40"),
        ("NVIDIA GeForce RTX 4080 SUPER", "8.9", "nvidia-geforce-40"),
        ("Tesla V100S-PCIE-32GB", "7.0", "nvidia-v100s-pcie"),
        ("Xavier", "7.2", "nvidia-jetson-xavier"),
        ("NVIDIA GeForce GTX 1080 Ti", "6.1", "nvidia-geforce-10"),
        ("NVIDIA TITAN V", "7.0", "nvidia-titan-v"),
        ("NVIDIA GeForce RTX 2080", "7.5", "nvidia-geforce-20"),
        ("NVIDIA GeForce RTX 2080 Ti", "7.5", "nvidia-rtx-2080-ti"),
        ("Quadro RTX 2000", "7.5", "nvidia-turing"),
        ("Orin", "8.7", "nvidia-jetson-orin"),
        ("GRID T4-16Q", "7.5", "nvidia-t4"),
        ("NVIDIA Thor", "11.0", "nvidia-jetson-thor"),
        ("Tesla K80", "3.7", "nvidia-kepler-maxwell"),
        ("", "8.0", "nvidia-ampere"),
        ("NVIDIA Something", "", "generic-cuda"),
        ("NVIDIA Something", "unknown", "generic-cuda"),
        ("NVIDIA VR200", "10.7", "nvidia-rubin"),
        ("NVIDIA Something", "8.8", "nvidia-newer"),
        ("NVIDIA Something", "13.0", "nvidia-newer"),
        ("Quadro T2000", "7.5", "nvidia-turing-gtx16"),
        ("Quadro RTX 4000", "7.5", "nvidia-turing"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "12.0",
            "nvidia-rtx-pro-6000-blackwell-server",
        ),
        (
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "12.0",
            "nvidia-rtx-pro-6000-blackwell",
        ),
    ],
)
def test_gpus_are_told_apart_by_whole_words(name, capability, family):
    seen = Observation(DeviceKind.CUDA, name=name, compute_capability=capability)
    assert CATALOGUE.family_of(seen).name == family


@pytest.mark.parametrize(
    ("cpu_family", "model", "family"),
    [
        (23, 1, "amd-zen"),
        (23, 49, "amd-zen2"),
        (23, 113, "amd-zen2"),
        (25, 1, "amd-zen3"),
        (25, 33, "amd-zen3"),
        (25, 17, "amd-zen4"),
        (25, 97, "amd-zen4"),
        (25, 160, "amd-zen4"),
        (26, 2, "amd-zen5"),
        (26, 0x4F, "amd-zen5"),
        (26, 0x50, "amd-zen6"),
        (26, 0x60, "amd-zen5"),
        (26, 0x80, "amd-zen6"),
        (26, 0xAF, "amd-zen6"),
        (26, 0xC0, "amd-zen6"),
        (26, 0xD0, "amd-zen6"),
        (26, 0xEF, "amd-zen6"),
        (26, 0xF0, "amd-family-26"),
        (99, 2, "generic-x86"),
        (None, None, "generic-x86"),
    ],
)
def test_amd_cpus_are_told_apart_by_family_and_model(cpu_family, model, family):
    seen = Observation(
        DeviceKind.CPU,
        vendor="AuthenticAMD",
        architecture="x86_64",
        cpu_family=cpu_family,
        cpu_model=model,
    )
    assert CATALOGUE.family_of(seen).name == family


@pytest.mark.parametrize(
    ("cpu_family", "model", "features", "family", "bfloat16"),
    [
        (19, 1, {"amx_bf16", "avx512_bf16"}, "intel-diamond-rapids", Support.NATIVE),
        (18, 1, {"avx512_bf16"}, "intel-nova-lake", Support.NATIVE),
        (18, 3, {"avx2"}, "intel-nova-lake", Support.EMULATED),
        (6, 0xDD, {"avx2"}, "intel-clearwater-forest", Support.EMULATED),
        (6, 0xCC, {"avx2"}, "intel-panther-lake", Support.EMULATED),
        (6, 0xD5, {"avx2"}, "intel-panther-lake", Support.EMULATED),
        (6, 0xAF, {"avx2"}, "intel-sierra-forest", Support.EMULATED),
        (6, 0xD7, {"avx2"}, "intel-client", Support.EMULATED),
    ],
)
def test_intel_cpus_are_told_apart_by_family_and_model(
    cpu_family, model, features, family, bfloat16
):
    seen = Observation(
        DeviceKind.CPU,
        vendor="GenuineIntel",
        architecture="x86_64",
        cpu_family=cpu_family,
        cpu_model=model,
        features=frozenset(features),
    )
    found = CATALOGUE.family_of(seen)
    assert found.name == family
    assert merge(seen, found).fact(DType.BFLOAT16).support is bfloat16


@pytest.mark.parametrize(
    ("architecture", "family", "float16"),
    [
        ("gfx900", "amd-vega", Support.EMULATED),
        ("gfx906", "amd-vega20", Support.NATIVE),
        ("gfx1010", "amd-rdna1", Support.EMULATED),
        ("gfx1012", "amd-rdna1-dot", Support.NATIVE),
        ("gfx1030", "amd-rdna2", Support.NATIVE),
        ("gfx1250", "amd-mi455x", Support.NATIVE),
        ("gfx1251", "amd-mi430x", Support.NATIVE),
    ],
)
def test_float16_is_native_where_it_accumulates_in_float32(architecture, family, float16):
    found = CATALOGUE.family_of(Observation(DeviceKind.ROCM, architecture=architecture))
    assert found.name == family
    assert found.dtypes[DType.FLOAT16].support is float16


@pytest.mark.parametrize(
    ("kind", "pci", "family"),
    [
        (DeviceKind.ROCM, "1002:74a1", "amd-mi300x"),
        (DeviceKind.ROCM, "1002:74a2", "amd-mi308x"),
        (DeviceKind.ROCM, "1002:74a9", "amd-mi300x-hf"),
        (DeviceKind.ROCM, "1002:74b9", "amd-mi325x"),
        (DeviceKind.XPU, "8086:b080", "intel-xe3-lpg"),
        (DeviceKind.XPU, "8086:fd81", "intel-xe3-lpg"),
        (DeviceKind.TPU, "1ae0:0076", "tpu-v7x"),
    ],
)
def test_pci_ids_tell_products_apart(kind, pci, family):
    architecture = "gfx942" if kind is DeviceKind.ROCM else ""
    seen = Observation(kind, pci=pci, architecture=architecture)
    assert CATALOGUE.family_of(seen).name == family


@pytest.mark.parametrize(
    ("name", "gpu", "cpu"),
    [
        ("Apple M1", "apple-m1", "apple-m1-cpu"),
        ("Apple M2 Pro", "apple-m2-pro", "apple-m2-cpu"),
        ("Apple M5", "apple-m5", "apple-m5-cpu"),
        ("Apple M5 Max", "apple-m5-max", "apple-m5-cpu"),
    ],
)
def test_a_mac_is_known_by_its_chip_and_its_cpu_is_left_in_float32(name, gpu, cpu):
    assert CATALOGUE.family_of(Observation(DeviceKind.MPS, name=name)).name == gpu
    seen = Observation(
        DeviceKind.CPU,
        name=name,
        architecture="arm64",
        implementer="0x61",
        features=frozenset({"bf16", "fp16"}),
    )
    family = CATALOGUE.family_of(seen)
    assert family.name == cpu
    facts = merge(seen, family)
    assert facts.fact(DType.BFLOAT16).support is Support.UNKNOWN
    assert propose(facts).policies == (Policy.FLOAT32,)


@pytest.mark.parametrize(
    ("implementer", "part", "board", "family"),
    [
        ("0x41", "0xd84", "Amazon EC2", "arm-graviton5"),
        ("0x41", "0xd84", "", "arm-neoverse-v3"),
        ("0x4e", "0x010", "", "nvidia-vera"),
    ],
)
def test_arm_cpus_are_told_apart_by_implementer_and_part(implementer, part, board, family):
    seen = Observation(
        DeviceKind.CPU,
        architecture="aarch64",
        implementer=implementer,
        part=part,
        board=board,
        features=frozenset({"asimdhp", "bf16"}),
    )
    found = CATALOGUE.family_of(seen)
    assert found.name == family
    assert merge(seen, found).fact(DType.BFLOAT16).support is Support.NATIVE


def test_what_a_newer_nvidia_gpu_has_is_assumed_and_says_so():
    seen = Observation(DeviceKind.CUDA, name="NVIDIA Next", compute_capability="14.0")
    facts = merge(seen, CATALOGUE.family_of(seen))
    for dtype in (DType.TF32, DType.BFLOAT16, DType.FLOAT16):
        assert facts.fact(dtype).support is Support.NATIVE
        assert "assumed" in facts.fact(dtype).reason
    assert propose(facts).recommended is Policy.MIXED_BFLOAT16


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("Orin", "8.7"),
        ("Xavier", "7.2"),
        ("NVIDIA Thor", "11.0"),
        ("NVIDIA GB10", "12.1"),
        ("NVIDIA N1X", "12.1"),
    ],
)
def test_what_a_driver_says_of_a_shared_memory_is_not_the_gpus_own(name, capability):
    """Synthetic: an NVML that names a size, as newer ones may."""
    seen = Observation(DeviceKind.CUDA, name=name, compute_capability=capability, memory_bytes=8)
    facts = merge(seen, CATALOGUE.family_of(seen))
    assert facts.observation.memory_bytes is None
    assert sum("shares the CPU's memory" in note for note in facts.notes) == 1
    assert (
        merge(replace(seen, notes=(UNIFIED_MEMORY_NOTE,)), CATALOGUE.family_of(seen)).notes
        == facts.notes
    )


@pytest.mark.parametrize("text", ["8", "8.x", "-8.0", "8.0-9.0", ""])
def test_a_capability_is_a_version_or_one_and_all_newer(text):
    with pytest.raises(ValueError, match="expected a capability like"):
        Match(compute_capability=(text,))


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


def test_an_unknown_family_is_refused_with_the_nearest():
    with pytest.raises(CatalogueError, match="did you mean 'nvidia-t4'"):
        CATALOGUE.family("nvidia-t44")


def test_the_data_is_found_in_the_source_tree():
    assert (profiles_folder() / "devices").is_dir()


def test_the_data_is_found_in_an_installed_package(tmp_path, monkeypatch):
    (tmp_path / "autoprec" / "_profiles").mkdir(parents=True)
    (tmp_path / "autoprec" / "hardware").mkdir()
    home = tmp_path / "autoprec" / "hardware" / "catalogue.py"
    monkeypatch.setattr("autoprec.hardware.catalogue.__file__", str(home))
    assert profiles_folder() == tmp_path / "autoprec" / "_profiles"


ROOT = """
families:
  generic-cpu: {kind: cpu, title: CPU, source: a book}
"""


def load(tmp_path: Path, **files: str):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    return load_catalogue(tmp_path)


def test_a_row_inherits_everything_but_what_belongs_to_one_product(tmp_path):
    catalogue = load(
        tmp_path,
        a="""
families:
  generic-cpu:
    kind: cpu
    title: CPU
    source: a book
    note: of all of them
    memory_bandwidth_gbps: 10
    match: {vendor: [Acme]}
    dtypes:
      float16: {support: emulated, reason: slow, alignment: 4, peak_dense_tflops: 1.5}
      bfloat16: {support: native, alignment: 2}
  child:
    from: generic-cpu
    title: Child
    source: [another, book]
    match: {cpu_model: ["1-3"]}
    dtypes:
      float16: {support: native}
""",
    )
    child = catalogue.family("child")
    assert child.ancestors == ("generic-cpu",)
    assert child.source == ("another", "book")
    assert (child.note, child.memory_bandwidth_gbps) == ("of all of them", None)
    assert (child.match.vendor, child.match.cpu_model) == (("Acme",), ("1-3",))
    row = child.dtypes[DType.FLOAT16]
    assert (row.support, row.alignment, row.reason) == (Support.NATIVE, 4, "")
    assert row.peak_dense_tflops is None
    assert child.dtypes[DType.BFLOAT16].alignment == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one key, families"),
        ("[1]", "expected one key, families"),
        ("families: 3", "expected a mapping of rows"),
        ("families: {x: 3}", r"families\.x: expected a mapping"),
        ("families: {1: {}}", "line 1: '1' given as a key, expected plain keys"),
        ("familes: {}", "expected one key, families"),
        ("families: {x: {title: a, source: b}}", r"families\.x: the key 'kind' is missing"),
        ("families: {x: {kind: cpu, title: a}}", r"families\.x: the key 'source' is missing"),
        ("families: {x: {kind: cpu, source: a}}", r"families\.x: the key 'title' is missing"),
        (
            "families: {x: {kind: cpu, titel: a, source: b}}",
            r"families\.x\.titel: unknown key; did you mean 'title'",
        ),
        ("families: {x: {kind: gpu, title: a, source: b}}", r"families\.x\.kind: 'gpu' given"),
        ("families: {x: {parent: y, title: a, source: b}}", r"unknown key; did you mean 'from'"),
        ("families: {x: {from: y, title: a, source: b}}", r"families\.x\.from: unknown family 'y'"),
        ("families: {x: {from: [y], title: a, source: b}}", r"families\.x\.from: unknown family"),
        ("families: {x: {from: x, title: a, source: b}}", "'x' inherits from itself"),
        (
            "families: {x: {kind: cpu, title: a, source: b, dtypes: {bf16: {}}}}",
            r"families\.x\.dtypes\.bf16: 'bf16' given",
        ),
        (
            "families: {x: {kind: cpu, title: a, source: b, match: {name: T4}}}",
            r"families\.x\.match\.name: 'T4' given, expected a list",
        ),
        (
            "families: {x: {kind: cpu, title: a, source: b, memory_bandwidth_gbps: -1}}",
            r"memory_bandwidth_gbps: -1.0 given, expected a number from",
        ),
        ("families: {x: &a {}, y: *a}", "aliases are not used; write it out"),
        ("families: {x: {}, x: {}}", "line 1: the key 'x' is given twice"),
        ("families: {? [a] : b}", "expected plain keys"),
        ("families: {<<: {a: b}}", "expected plain keys"),
        ("families: [", "not valid YAML"),
        ("families: !!python/name:os.system {}", "YAML tags"),
        ("families: {x: \x00}", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_fix(tmp_path, text, message):
    with pytest.raises(CatalogueError, match=message) as caught:
        load(tmp_path, wrong=text).families
    assert "wrong.yaml" in str(caught.value)


def test_a_family_in_two_files_is_refused(tmp_path):
    with pytest.raises(CatalogueError, match=r"'generic-cpu' is in a\.yaml already"):
        load(tmp_path, a=ROOT, b=ROOT)


def test_a_missing_folder_is_told(tmp_path):
    with pytest.raises(CatalogueError, match="installed completely"):
        load_catalogue(tmp_path / "nowhere")


def test_a_kind_that_no_family_describes_is_told(tmp_path):
    with pytest.raises(CatalogueError, match="no family of kind tpu"):
        load(tmp_path, a=ROOT).family_of(Observation(DeviceKind.TPU))
