"""Intel GPUs through the PCI bus, as PyTorch lists them."""

import pytest

from autoprec.core.device.observation import DeviceKind
from autoprec.hardware.probes.intel import probe_intel
from benchmarks.recordings.machine_replay import synthetic_machine as machine
from tests.hardware.probes.pci_bus import BUS, bus


def test_intel_gpus_are_display_devices_of_the_vendor():
    found = bus(("8086", "56A0", "030000"), ("8086", "1237", "060000"), ("10de", "1", "030000"))
    assert [device.pci for device in probe_intel(found).devices] == ["8086:56a0"]
    assert probe_intel(machine()).devices == ()


ON_BOARD, ARC, MAX = (
    ("8086:a780", "0000:00:02.0"),
    ("8086:56a0", "0000:03:00.0"),
    ("8086:0bd5", "0000:29:00.0"),
)


def intel(*gpus, folders=(), **variables):
    """What the probe sees of GPUs at these addresses, synthetic; `folders` lie under the last's."""
    files = {}
    for pci, address in gpus:
        vendor, device = pci.split(":")
        values = {"vendor": f"0x{vendor}", "device": f"0x{device}", "class": "0x030000"}
        files |= {f"{BUS}/{address}/{name}": value for name, value in values.items()}
    files |= {f"{BUS}/{gpus[-1][1]}/{folder}/any": "" for folder in folders}
    return probe_intel(machine(files=files, variables=variables))


def test_a_discrete_intel_gpu_leaves_the_cpus_own_out_as_pytorch_does():
    seen = intel(ON_BOARD, ARC)
    assert [(each.index, each.pci, each.uuid) for each in seen.devices] == [(0, *ARC)]
    assert "only discrete ones" in seen.notes[0]
    alone = intel(ON_BOARD)
    assert [each.pci for each in alone.devices] == [ON_BOARD[0]]
    assert alone.notes == ()


@pytest.mark.parametrize("folders", [("tile0", "tile1"), ("drm/card1/gt/gt0", "drm/card1/gt/gt1")])
def test_each_tile_of_an_intel_gpu_is_a_device_unless_they_are_joined(folders):
    seen = intel(ARC, MAX, folders=folders).devices
    assert [each.uuid for each in seen] == [ARC[1], f"{MAX[1]}/0", f"{MAX[1]}/1"]
    assert [each.index for each in seen] == [0, 1, 2]
    assert [each.partition for each in seen] == ["", "one of 2 tiles", "one of 2 tiles"]
    joined = intel(ARC, MAX, folders=folders, ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE").devices
    assert [each.uuid for each in joined] == [ARC[1], MAX[1]]
    masked = intel(ARC, MAX, folders=folders, ZE_AFFINITY_MASK="2").devices
    assert [(each.index, each.uuid) for each in masked] == [(0, f"{MAX[1]}/1")]


def test_an_intel_gpu_that_a_virtual_machine_has_is_not_here():
    files = {
        f"{BUS}/0000:03:00.0/{name}": value
        for name, value in (
            ("vendor", "0x8086"),
            ("device", "0x56a0"),
            ("class", "0x030000"),
            ("uevent", "DRIVER=vfio-pci\n"),
        )
    }
    assert probe_intel(machine(files=files)).devices == ()


@pytest.mark.parametrize(("mask", "count"), [("1", 1), ("0.0,0.1", 1), ("0,1", 2), ("", 0)])
def test_the_affinity_mask_hides_intel_gpus(mask, count):
    two = [("8086", "56a0", "030000")] * 2
    seen = probe_intel(bus(*two, variables={"ZE_AFFINITY_MASK": mask}))
    assert len(seen.devices) == count
    assert bool(seen.notes) == (count == 0)
    assert seen.unusable == ()
    (missed,) = probe_intel(bus(*two, variables={"ZE_AFFINITY_MASK": "7"})).unusable
    assert missed.kind is DeviceKind.XPU


def test_a_device_selector_is_said_to_be_unresolved():
    found = bus(("8086", "56a0", "030000"), variables={"ONEAPI_DEVICE_SELECTOR": "gpu"})
    assert "does not evaluate it" in probe_intel(found).notes[0]
