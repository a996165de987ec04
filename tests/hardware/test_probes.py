"""What must hold of the other probes: CPU, AMD, Intel, Apple, TPU and the frameworks."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.device.merging import merge
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import propose
from autoprec.core.dtypes import Policy
from autoprec.core.probe_result import FrameworkFact
from autoprec.errors import CatalogueError
from autoprec.hardware import other_accelerators
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.other_accelerators import load_other_accelerators
from autoprec.hardware.probes.amd import probe_amd
from autoprec.hardware.probes.apple import probe_apple
from autoprec.hardware.probes.cpu import probe_cpu
from autoprec.hardware.probes.frameworks import find_frameworks
from autoprec.hardware.probes.intel import probe_intel
from autoprec.hardware.probes.other_accelerators import probe_other_accelerators
from autoprec.hardware.probes.pci import visible_ordinals
from autoprec.hardware.probes.tpu import probe_tpu
from autoprec.hardware.recording import Package
from autoprec.hardware.recording import synthetic_machine as machine

NODES = "/sys/class/kfd/kfd/topology/nodes"
BUS = "/sys/bus/pci/devices"


def cpu(text, **answers):
    return probe_cpu(machine(files={"/proc/cpuinfo": text}, **answers)).devices[0]


def test_features_are_those_that_every_core_has():
    seen = cpu("processor: 0\nflags: fma avx2 bf16\n\nprocessor: 1\nflags: fma avx2\n\n")
    assert seen.features == {"fma", "avx2"}


def test_cores_are_counted_once_where_they_run_two_threads():
    block = "processor: {}\nphysical id: 0\ncore id: {}\n\n"
    seen = cpu("".join(block.format(i, i // 2) for i in range(4)), usable_processors=3)
    assert (seen.cores, seen.usable_cores) == (2, 3)


def test_numbers_that_are_none_are_left_out():
    seen = cpu("processor: 0\ncpu family: x\nmodel: \n\n")
    assert (seen.cpu_family, seen.cpu_model) == (None, None)


@pytest.mark.parametrize(
    ("granted", "denied"), [(True, set()), (None, set()), (False, {"amx_bf16"})]
)
def test_amx_is_denied_only_where_the_kernel_says_so(granted, denied):
    seen = cpu("processor: 0\nflags: fma amx_bf16\n\n", tiles_permitted=granted)
    assert seen.denied == denied
    assert seen.features == {"fma", "amx_bf16"} - denied


def test_where_proc_is_absent_py_cpuinfo_is_asked_and_known_to_be_partial():
    found = {"brand_raw": "A", "vendor_id_raw": "B", "family": 6, "model": 7, "flags": ["avx2"]}
    seen = probe_cpu(machine(cpuid=found, system="Windows")).devices[0]
    assert (seen.name, seen.vendor, seen.cpu_family, seen.cpu_model) == ("A", "B", 6, 7)
    assert seen.features == {"avx2"}
    assert seen.partial_features


def test_what_py_cpuinfo_says_wrongly_is_left_out():
    seen = probe_cpu(machine(cpuid={"family": "six", "flags": None})).devices[0]
    assert (seen.cpu_family, seen.features) == (None, frozenset())
    assert any("features could not be read" in note for note in seen.notes)


@pytest.mark.parametrize("system", ["Linux", "Windows", "Darwin"])
@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_a_cpu_of_which_nothing_can_be_read_is_offered_float32(system, architecture):
    (seen,) = probe_cpu(machine(system=system, architecture=architecture)).devices
    assert seen.features == frozenset()
    proposal = propose(merge(seen, load_catalogue().family_of(seen)))
    assert proposal.policies == (Policy.FLOAT32,)


def test_the_board_is_known_by_its_makers_names():
    files = {"/sys/class/dmi/id/sys_vendor": "Amazon EC2\n"}
    assert probe_cpu(machine(files=files)).devices[0].board == "Amazon EC2"


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


def bus(*devices, **answers):
    files = {}
    for i, (vendor, device, kind) in enumerate(devices):
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            files[f"{BUS}/0000:00:{i:02x}.0/{name}"] = f"0x{value}\n"
    return machine(files=files, **answers)


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


def test_tpu_chips_are_counted_without_asking_any_library():
    chips = [("1ae0", "005e", "ff0000")] * 2
    assert len(probe_tpu(bus(*chips)).devices) == 2
    hidden = probe_tpu(bus(*chips, variables={"TPU_VISIBLE_CHIPS": ""}))
    assert (hidden.devices, hidden.unusable) == ((), ())
    assert "hides all 2" in hidden.notes[0]
    missed = probe_tpu(bus(*chips, variables={"TPU_VISIBLE_CHIPS": "9"}))
    assert (missed.devices, missed.notes) == ((), ())
    assert (missed.unusable[0].kind, "hides all 2" in missed.unusable[0].text) == (
        DeviceKind.TPU,
        True,
    )


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
    monkeypatch.setattr(other_accelerators, "profiles_folder", lambda: tmp_path)
    with pytest.raises(CatalogueError, match=r"other_accelerators\.yaml: .*titel: unknown key"):
        other_accelerators.load_other_accelerators.__wrapped__()


SYSCTL = {
    "sysctl machdep.cpu.brand_string": "machdep.cpu.brand_string: Apple M2\n",
    "sysctl hw.memsize": "hw.memsize: 17179869184\n",
    "sysctl hw.optional.arm": "hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_SME: 0\n",
}


def test_a_mac_has_a_gpu_and_a_cpu_that_share_the_memory():
    mac = machine(system="Darwin", architecture="arm64", commands=SYSCTL)
    gpu = probe_apple(mac).devices[0]
    assert (gpu.kind, gpu.name, gpu.memory_bytes) == (DeviceKind.MPS, "Apple M2", 16 * 2**30)
    seen = probe_cpu(mac).devices[0]
    assert (seen.name, seen.implementer, seen.features) == ("Apple M2", "0x61", {"bf16"})
    assert not seen.partial_features


def test_a_mac_that_does_not_answer_is_still_a_mac():
    mac = machine(system="Darwin", architecture="arm64", physical_memory=8)
    assert probe_apple(mac).devices[0].memory_bytes == 8
    assert probe_cpu(mac).devices[0].name == ""


def test_a_python_that_rosetta_translates_is_on_no_intel_mac():
    """Synthetic: sysctl's answers there, and on an Intel Mac, which does not know the name."""
    answers = {
        "sysctl sysctl.proc_translated": "sysctl.proc_translated: 1\n",
        "sysctl machdep.cpu.brand_string": "machdep.cpu.brand_string: Apple M2\n",
    }
    seen = probe_apple(machine(system="Darwin", architecture="x86_64", commands=answers))
    assert (seen.devices, seen.notes) == ((), ())
    assert seen.unusable[0].kind is DeviceKind.MPS
    assert "Install Python for arm64" in seen.unusable[0].text
    native = {"sysctl sysctl.proc_translated": "sysctl.proc_translated: 0\n"}
    apple = probe_apple(machine(system="Darwin", architecture="arm64", commands=native))
    assert (len(apple.devices), apple.unusable) == (1, ())
    old = probe_apple(machine(system="Darwin", architecture="x86_64"))
    assert (len(old.notes), old.unusable) == (1, ())


def test_an_intel_mac_has_no_gpu_to_train_on():
    mac = machine(system="Darwin", architecture="x86_64", commands=SYSCTL)
    assert probe_apple(mac).devices == ()
    assert "Intel Mac" in probe_apple(mac).notes[0]
    assert probe_cpu(mac).devices[0].implementer == ""
    assert probe_apple(machine()).notes == ()


def test_frameworks_are_known_by_their_files_else_by_their_distributions():
    packages = {
        "torch": Package({"version.py": "__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\n"}),
        "tensorflow": Package(),
        "tensorflow-cpu": Package(version="2.21.0"),
        "keras": Package(version="3.15.1"),
        "jax": Package({"version.py": "_version = '1'\n"}),
    }
    assert find_frameworks(machine(packages=packages)) == (
        FrameworkFact("torch", "2.13.0", "cuda 12.8"),
        FrameworkFact("tensorflow", "2.21.0"),
        FrameworkFact("keras", "3.15.1"),
        FrameworkFact("jax", "unknown"),
    )
    assert find_frameworks(machine()) == ()


@settings(deadline=None)
@given(st.integers(0, 8), st.none() | st.text(alphabet="0123456789,-+ gx", max_size=12))
def test_a_visibility_list_never_invents_or_repeats_a_device(count, text):
    shown = visible_ordinals(count, text)
    assert len(set(shown)) == len(shown)
    assert all(0 <= ordinal < count for ordinal in shown)
