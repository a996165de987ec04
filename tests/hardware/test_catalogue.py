"""How strictly the catalogue's files are read, and what a row inherits."""

from pathlib import Path

import pytest

from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import DType
from autoprec.errors import CatalogueError
from autoprec.hardware.catalogue import load_catalogue, profiles_folder

CATALOGUE = load_catalogue()


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
