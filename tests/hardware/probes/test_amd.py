"""AMD GPUs through the kernel's KFD topology, and which of them a process sees."""

import pytest

from autoprec.core.device.merging import merge
from autoprec.core.device.observation import DeviceKind
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.probes.amd import probe_amd
from benchmarks.recordings.machine_replay import synthetic_machine as machine
from tests.hardware.probes.pci_bus import BUS, bus

NODES = "/sys/class/kfd/kfd/topology/nodes"


def kfd(*nodes, **answers):
    files = {f"{NODES}/{i}/properties": text for i, text in enumerate(nodes)}
    return probe_amd(machine(files=files, **answers))


GPU = "simd_count 8\ngfx_target_version {}\nvendor_id 4098\ndevice_id 29704\n"


@pytest.mark.parametrize(
    ("version", "gfx"),
    [(90010, "gfx90a"), (90402, "gfx942"), (110001, "gfx1101"), (90008, "gfx908"), (0, "")],
)
def test_the_architecture_is_the_compilers_name(version, gfx):
    seen = kfd("simd_count 0\n", GPU.format(version)).devices
    assert [device.architecture for device in seen] == [gfx]
    assert seen[0].pci == "1002:7408"
    assert seen[0].memory_bytes is None


@pytest.mark.parametrize(("cores", "gib"), [(0, 0.5), (8, None)])
def test_on_a_node_with_the_cpu_no_memory_is_the_gpus_own(cores, gib):
    node = GPU.format(90000) + f"cpu_cores_count {cores}\n"
    files = {
        f"{NODES}/0/properties": node,
        f"{NODES}/0/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 536870912\n",
    }
    (seen,) = probe_amd(machine(files=files)).devices
    assert seen.memory_bytes == (gib and gib * 2**30)
    assert bool(seen.notes) == bool(cores)


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, [0, 1, 2]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-abc"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_the_runtimes_filter_counts_before_hips(variables, shown):
    versions = [90000 + i for i in range(3)]
    seen = kfd(*(GPU.format(version) for version in versions), variables=variables)
    expected = [f"gfx90{ordinal}" for ordinal in shown]
    assert [device.architecture for device in seen.devices] == expected
    assert bool(seen.notes or seen.unusable) == (not shown)


# KFD writes unique_id in decimal; 0 is what GPUs before Vega and most APUs have.
IDENTIFIERS = (0x00C0FFEE00000001, 0x00C0FFEE00000002, 0)


def identified(variables):
    nodes = [f"{GPU.format(90000 + i)}unique_id {u}\n" for i, u in enumerate(IDENTIFIERS)]
    return [int(d.architecture[-1]) for d in kfd(*nodes, variables=variables).devices]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GPU-00c0ffee00000002", [1]),
        ("GPU-00C0FFEE00000002,0", [1, 0]),
        ("gpu-00c0ffee00000001", [0]),
        ("GPU-00c0ffee", []),  # fits two
        ("GPU-XX", []),
        ("2,GPU-00c0ffee000000010", [2]),  # longer than an identifier
        (" 1 , 0x2", [1, 2]),
        ("+1,00", [1, 0]),
        ("09", []),
        ("1,1,0", [1]),
        ("1,x,0", [1]),
        ("1,,0", [1]),
        ("-1", []),
        ("", []),
    ],
)
def test_the_runtimes_list_is_read_as_the_runtime_reads_it(text, shown):
    assert identified({"ROCR_VISIBLE_DEVICES": text}) == shown


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GPU-00c0ffee00000002", [1]),
        ("2,GPU-00c0ffee", [2, 0]),  # the first of two
        ("GPU-00C0FFEE00000002", []),
        ("GPU-XX,1", [2, 1]),
        ("1,1,0", [1, 0]),
        ("1,x,0", [1]),
        ("0, 1", [0]),
        ("01", []),
        ("+1", []),
        ("1gpu", []),
        ("0,", [0]),
        ("3", []),
    ],
)
def test_hips_list_is_read_as_hip_reads_it(name, text, shown):
    assert identified({name: text}) == shown


def test_an_identifier_counts_among_those_the_runtime_leaves():
    variables = {"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "GPU-00c0ffee00000002"}
    assert identified(variables) == [1]
    variables["HIP_VISIBLE_DEVICES"] = "GPU-00c0ffee00000001"
    assert identified(variables) == []


def test_a_worker_finds_the_gpu_again_by_the_ordinal_before_hips_filter():
    variables = {"ROCR_VISIBLE_DEVICES": "2,1,0", "HIP_VISIBLE_DEVICES": "2,0"}
    seen = kfd(*(GPU.format(90000 + i) for i in range(3)), variables=variables).devices
    assert [(d.index, d.uuid, d.architecture) for d in seen] == [
        (0, "2", "gfx900"),
        (1, "0", "gfx902"),
    ]


@pytest.mark.parametrize(
    ("kind", "variables", "missed"),
    [
        ("030000", {}, True),
        ("120000", {}, True),
        ("040300", {}, False),
        ("030000", {"HIP_VISIBLE_DEVICES": "0"}, True),
        ("030000", {"HIP_VISIBLE_DEVICES": "-1"}, False),
        ("030000", {"ROCR_VISIBLE_DEVICES": ""}, False),
    ],
)
def test_an_amd_gpu_without_its_driver_cannot_be_used(kind, variables, missed):
    seen = probe_amd(bus(("1002", "74a1", kind), variables=variables))
    assert seen.devices == seen.notes == ()
    assert [each.kind for each in seen.unusable] == [DeviceKind.ROCM] * missed


@pytest.mark.parametrize(
    ("mode", "partition"),
    [
        ({"compute": "SPX", "memory": "NPS1"}, ""),
        ({}, ""),
        ({"compute": "DPX", "memory": "NPS1"}, "DPX/NPS1"),
        ({"compute": "CPX", "memory": "NPS4"}, "CPX/NPS4"),
        ({"compute": "CPX"}, "CPX"),
    ],
)
def test_a_partition_of_an_mi300_has_not_the_whole_ones_peaks(mode, partition):
    """A kernel writes the partition's number into the location's upper or its lowest bits."""
    place = f"{BUS}/0001:c1:00.0/current_{{}}_partition"
    files = {place.format(each): f"{name}\n" for each, name in mode.items()}
    gpu = "simd_count 304\ngfx_target_version 90402\nvendor_id 4098\ndevice_id 29857\ndomain 1\n"
    for i, number in enumerate((0, 1, 5 << 28)):
        files[f"{NODES}/{i}/properties"] = f"{gpu}location_id {0xC100 | number}\n"
    seen = probe_amd(machine(files=files)).devices
    assert [device.partition for device in seen] == [partition] * 3
    facts = merge(seen[2], load_catalogue().family_of(seen[2]))
    assert (facts.memory_bandwidth_gbps is None) == bool(partition)


def test_an_amd_gpu_from_before_rocm_is_not_missed():
    old = bus(("1002", "68f9", "030000"))
    files = {**old._recording.files, f"{BUS}/0000:00:00.0/uevent": "DRIVER=radeon\n"}
    assert probe_amd(machine(files=files)).unusable == ()


def test_nodes_are_taken_in_the_order_of_their_numbers():
    files = {f"{NODES}/{i}/properties": GPU.format(90000 + i) for i in (10, 9, 2)}
    seen = probe_amd(machine(files=files)).devices
    assert [device.architecture for device in seen] == ["gfx902", "gfx909", "gfx90a"]
