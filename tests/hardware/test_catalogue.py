"""The laws of the data in profiles/devices, and how strictly it is read."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from autoprec.core.device import DeviceKind, Match, Observation, Support
from autoprec.core.dtypes import DType
from autoprec.errors import CatalogueError
from autoprec.hardware.catalogue import load_catalogue, profiles_folder

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
        for name in ("compute_capability", "architecture", "pci", "vendor"):
            wider = getattr(parent, name)
            assert not wider or set(getattr(family.match, name)) <= set(wider), name


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
        ("Xavier", "7.2", "nvidia-volta"),
        ("Orin", "8.7", "nvidia-ampere"),
        ("GRID T4-16Q", "7.5", "nvidia-t4"),
        ("NVIDIA Thor", "11.0", "nvidia-jetson-thor"),
        ("Tesla K80", "3.7", "nvidia-kepler-maxwell"),
        ("", "8.0", "nvidia-ampere"),
        ("NVIDIA Something", "", "generic-cuda"),
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


def test_everything_the_catalogue_must_know_is_there():
    capabilities = {c for f in FAMILIES.values() for c in f.match.compute_capability}
    assert capabilities >= {"6.0", "6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}
    names = " ".join(FAMILIES)
    for part in (
        *(f"amd-cdna{i}" for i in range(1, 5)),
        *(f"amd-rdna{i}" for i in range(2, 5)),
        *(f"amd-zen{i}" for i in range(2, 6)),
        *(f"apple-m{i}" for i in range(1, 5)),
        *(f"tpu-v{i}" for i in ("2", "3", "4", "5e", "5p", "6e", "7x")),
        *(f"arm-neoverse-{i}" for i in ("n1", "n2", "v1", "v2")),
        *(f"arm-graviton{i}" for i in (2, 3, 4)),
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
    note: only of this one
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
    assert (child.note, child.memory_bandwidth_gbps) == ("", None)
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
