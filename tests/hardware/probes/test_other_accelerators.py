"""Accelerators that autoprec does not tune are noted, with what to use instead."""

import re

import pytest

from autoprec.errors import CatalogueError
from autoprec.hardware import catalogue
from autoprec.hardware.catalogue import load_other_accelerators
from autoprec.hardware.probes.pci import probe_other_accelerators
from benchmarks.recordings.machine_replay import synthetic_machine as machine
from tests.hardware.probes.pci_bus import bus


def test_accelerators_with_a_stack_of_their_own_are_noted():
    found = probe_other_accelerators(
        bus(*[("1d0f", "7164", "088000")] * 2, ("1da3", "1020", "120000"))
    )
    assert found.devices == ()
    gaudi, trainium = sorted(found.notes)
    assert gaudi.startswith("1 x Intel Gaudi 2 in this machine, which autoprec does not tune: ")
    assert trainium.startswith("2 x AWS Trainium in this machine")
    assert "Neuron SDK" in trainium


def test_other_devices_of_the_same_vendors_are_not_noted():
    assert (
        probe_other_accelerators(bus(("1d0f", "ec20", "020000"), ("10de", "7164", "030000"))).notes
        == ()
    )
    assert probe_other_accelerators(machine()).notes == ()


@pytest.mark.parametrize("accelerator", load_other_accelerators(), ids=lambda each: each.title)
def test_a_named_accelerator_has_ids_of_its_own_advice_and_a_source(accelerator):
    assert accelerator.advice
    assert accelerator.source
    for pci in accelerator.pci:
        assert re.fullmatch("[0-9a-f]{4}:[0-9a-f]{4}", pci)
        assert [each for each in load_other_accelerators() if pci in each.pci] == [accelerator]


def test_a_wrong_file_of_other_accelerators_is_refused_with_its_name(tmp_path, monkeypatch):
    (tmp_path / "other_accelerators.yaml").write_text("accelerators: [{titel: x}]", "utf-8")
    monkeypatch.setattr(catalogue, "profiles_folder", lambda: tmp_path)
    with pytest.raises(CatalogueError, match=r"other_accelerators\.yaml: .*titel: unknown key"):
        catalogue.load_other_accelerators.__wrapped__()
