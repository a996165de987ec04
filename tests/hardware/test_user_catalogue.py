"""What must hold of the device rows that users add in a folder of their own."""

import json

import pytest

from autoprec.cli import main
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.errors import CatalogueError
from autoprec.hardware.catalogue import USER_FOLDER_VARIABLE, load_catalogue, user_folder

LAB = """
families:
  lab-a100:
    from: nvidia-a100-pcie-40gb
    title: our A100 with a power cap
    match: {name: ['\\bA100-PCIE-40GB-CAPPED\\b']}
    source: our own measurements
    memory_bandwidth_gbps: 1400
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    load_catalogue.cache_clear()
    folder = tmp_path / "devices"
    folder.mkdir()
    monkeypatch.setenv(USER_FOLDER_VARIABLE, str(folder))
    yield folder
    load_catalogue.cache_clear()


def write(folder, text):
    path = folder / "lab.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_row_of_the_users_is_found_beside_the_packaged_ones(own):
    path = write(own, LAB)
    catalogue = load_catalogue()
    seen = Observation(
        DeviceKind.CUDA, name="NVIDIA A100-PCIE-40GB-CAPPED", compute_capability="8.0"
    )
    family = catalogue.family_of(seen)
    assert (family.name, family.origin) == ("lab-a100", str(path))
    assert family.memory_bandwidth_gbps == 1400
    assert catalogue.family("nvidia-a100").origin == "nvidia.yaml"


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_probe_says_which_file_a_row_is_from(own, capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "400")
    path = write(own, LAB)
    assert main(["probe", "--device", "lab a100", *words]) == 0
    printed = capsys.readouterr().out
    assert str(path) in printed
    if words:
        assert json.loads(printed)["devices"][0]["facts"]["origin"] == str(path)


def test_a_packaged_family_is_not_replaced(own):
    path = write(own, "families: {nvidia-t4: {from: nvidia-turing, title: T4, source: mine}}")
    with pytest.raises(CatalogueError, match=r"'nvidia-t4' is in nvidia\.yaml already; to refine"):
        load_catalogue()
    write(own, LAB.replace("lab-a100", "lab-t4").replace("nvidia-a100-pcie-40gb", "nvidia-t4"))
    assert load_catalogue().family("lab-t4").ancestors[0] == "nvidia-t4"
    assert path.exists()


def test_the_users_rows_are_read_as_strictly_as_the_packaged_ones(own, capsys):
    write(own, LAB.replace("title:", "titel:"))
    assert main(["probe", "--device", "a100"]) == 2
    printed = capsys.readouterr().err
    assert "lab.yaml" in printed
    assert "did you mean 'title'" in printed


def test_a_folder_that_was_named_must_hold_device_files(own):
    with pytest.raises(CatalogueError, match=r"no device files \(\*\.yaml with families\)$"):
        load_catalogue()


def test_an_empty_variable_says_that_there_are_none(monkeypatch):
    monkeypatch.setenv(USER_FOLDER_VARIABLE, "")
    assert user_folder() is None


def test_without_the_variable_the_configuration_directory_counts_if_it_has_files(
    tmp_path, monkeypatch
):
    monkeypatch.delenv(USER_FOLDER_VARIABLE)
    monkeypatch.setattr("platformdirs.user_config_path", lambda *_, **__: tmp_path)
    assert user_folder() is None
    (tmp_path / "devices").mkdir()
    assert user_folder() is None
    write(tmp_path / "devices", LAB)
    assert user_folder() == tmp_path / "devices"
