"""What must hold of NVIDIA GPUs: CUDA's numbering, and a note in place of every failure."""

import pytest

from autoprec.core.device.merging import merge
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import DType
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.nvidia import CudaAnswer, CudaDevice, probe_nvidia
from autoprec.hardware.probes.nvml import NvmlDevice, NvmlInstance, NvmlSnapshot, read_nvml
from benchmarks.recordings.machine_replay import NvmlError, NvmlReplay
from benchmarks.recordings.machine_replay import synthetic_machine as machine

A = NvmlDevice("GPU-aaaa-1", "NVIDIA A100-SXM4-40GB", "8.0", 40 * 2**30)
B = NvmlDevice("GPU-aabb-2", "NVIDIA A100-SXM4-40GB", "8.0", 40 * 2**30)
C = NvmlDevice("GPU-cccc-3", "Tesla T4", "7.5", 15 * 2**30)
PARTS = (
    NvmlInstance("MIG-1111", "1g.5gb", 5 * 2**30),
    NvmlInstance("MIG-2222", "2g.10gb", 10 * 2**30),
)
SPLIT = NvmlDevice("GPU-dddd-4", "NVIDIA A100-SXM4-40GB", "8.0", 40 * 2**30, True, PARTS)


def probe(*gpus, **variables):
    return probe_nvidia(machine(nvml=NvmlSnapshot("580.1", gpus), variables=variables))


def uuids(*gpus, visible):
    return [device.uuid for device in probe(*gpus, CUDA_VISIBLE_DEVICES=visible).devices]


def test_all_gpus_are_seen_with_what_nvml_says():
    seen = probe(A, B)
    first = seen.devices[0]
    assert (first.index, first.name, first.compute_capability) == (0, A.name, "8.0")
    assert (first.memory_bytes, first.driver, first.uuid) == (A.memory_bytes, "580.1", A.uuid)
    assert [device.index for device in seen.devices] == [0, 1]
    assert seen.notes == ()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0,2", [A, C]),
        ("2,0", [C, A]),
        (" 1 , 0 ", [B, A]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [A]),
        ("0,7,1", [A]),
        ("1,1", []),
        ("none", []),
        ("1gpu,0x", [B, A]),
        ("+1", [B]),
        ("GPU-aaaa", [A]),
        ("GPU-aabb,GPU-c", [B, C]),
        ("GPU-aa", []),
        ("GPU-cccc-3,GPU-aa,GPU-aabb", [C]),
        ("GPU-aaaa,GPU-aaaa-1", []),
        ("GPU-aaaa,1", [A]),
        ("GPU-zzzz", []),
        ("MIG-1111", []),
    ],
)
def test_cuda_visible_devices_is_read_in_all_its_forms(visible, expected):
    assert uuids(A, B, C, visible=visible) == [gpu.uuid for gpu in expected]


def shown_by_cuda(gpu, *instances):
    """What is seen of a divided GPU whose instances CUDA shows in this order."""
    devices = tuple(CudaDevice(gpu.name, "8.0", uuid=each.uuid[4:]) for each in instances)
    split = machine(nvml=NvmlSnapshot("580.1", (gpu,)), cuda=CudaAnswer("13.0", devices))
    return probe_nvidia(split).devices


def test_of_a_split_gpu_those_instances_are_seen_that_cuda_shows_in_its_order():
    seen = shown_by_cuda(SPLIT, PARTS[1], PARTS[0])
    assert [(each.index, each.uuid) for each in seen] == [(0, "MIG-2222"), (1, "MIG-1111")]


def test_a_split_gpu_whose_driver_does_not_answer_cannot_be_used_unless_it_is_hidden():
    assert "MIG is enabled, and CUDA shows none: libcuda" in probe(SPLIT).unusable[0].text
    assert probe(A, SPLIT, CUDA_VISIBLE_DEVICES="MIG-2222").unusable
    hidden = probe(SPLIT, CUDA_VISIBLE_DEVICES="")
    assert (hidden.devices, hidden.unusable, len(hidden.notes)) == ((), (), 1)


@pytest.mark.parametrize(
    ("name", "partition"),
    [("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "3g.20gb"), ("4g.20gb", "4g.20gb"), ("", "MIG")],
)
def test_an_instance_is_known_by_its_profile(name, partition):
    instance = NvmlInstance("MIG-f", name)
    gpu = NvmlDevice("GPU-f", "NVIDIA A100", "8.0", 1, True, (instance,))
    assert shown_by_cuda(gpu, instance)[0].partition == partition


def test_a_virtual_gpu_is_a_part_of_one():
    gpu = NvmlDevice("GPU-f", "NVIDIA A40-8Q", "8.6", 8 * 2**30, virtual=True)
    seen = probe(gpu).devices[0]
    assert seen.partition == "vGPU"
    facts = merge(seen, load_catalogue().family_of(seen))
    assert facts.fact(DType.BFLOAT16).peak_dense_tflops is None
    assert facts.memory_bandwidth_gbps is None


def test_an_instance_has_its_own_memory_and_is_marked_as_a_part():
    (device,) = shown_by_cuda(SPLIT, PARTS[1])
    assert (device.memory_bytes, device.partition) == (10 * 2**30, "2g.10gb")
    assert device.compute_capability == "8.0"


def test_a_gpu_that_is_split_into_nothing_is_a_note():
    seen = probe(NvmlDevice("GPU-e", "A100", "8.0", 1, True))
    assert seen.devices == ()
    assert "has no instances" in seen.unusable[0].text


def test_gpus_of_several_sorts_may_be_numbered_otherwise():
    assert "CUDA_DEVICE_ORDER" in probe(A, C).notes[0]
    assert probe(A, C, CUDA_DEVICE_ORDER="PCI_BUS_ID").notes == ()


def test_hiding_every_gpu_is_said():
    assert probe(A, CUDA_VISIBLE_DEVICES="-1").notes == (
        "CUDA_VISIBLE_DEVICES='-1' hides all 1 NVIDIA GPUs",
    )


def test_without_nvidia_there_is_nothing_to_say():
    assert probe_nvidia(machine()) == probe_nvidia(machine(nvml=NvmlSnapshot()))
    assert probe_nvidia(machine()).notes == ()


def test_without_pynvml_a_gpu_on_the_bus_is_a_note():
    class Bare(type(machine())):
        def nvml(self):
            raise ImportError("no module")

    bare = Bare(machine(files={"/proc/driver/nvidia/gpus/0/information": "Model: A"})._recording)
    assert "pynvml cannot be imported" in probe_nvidia(bare).unusable[0].text


BUS = "/sys/bus/pci/devices/0000:01:00.0"


def on_the_bus(driver="nvidia", kind="030200"):
    files = {f"{BUS}/vendor": "0x10de\n", f"{BUS}/class": f"0x{kind}\n"}
    return {"files": {**files, f"{BUS}/uevent": f"DRIVER={driver}\nPCI_CLASS=30200\n"}}


class Mismatched(type(machine())):
    """A machine whose kernel module and library are of two versions."""

    def nvml(self):
        return Trouble("nvmlInit", code=18)


def mismatched(**answers):
    return probe_nvidia(Mismatched(machine(**answers)._recording))


SIGNS = {
    "the bus": on_the_bus(),
    "a data-centre board": on_the_bus(kind="030200"),
    "the driver's folder": {"folders": {"/proc/driver/nvidia/gpus": ("0000:01:00.0",)}},
    "a container": {"folders": {"/dev": ("null", "nvidia0", "nvidiactl")}},
    "Jetson": {"folders": {"/dev": ("nvhost-gpu", "nvmap")}},
    "WSL": {"folders": {"/dev": ("dxg",), "/usr/lib/wsl/lib": ("libcuda.so.1", "libd3d12.so")}},
}
NO_SIGNS = {
    "nothing": {},
    "its sound": on_the_bus(kind="040300"),
    "a virtual machine's": on_the_bus(driver="vfio-pci"),
    "the control file alone": {"folders": {"/dev": ("nvidiactl",)}},
    "WSL with another's GPU": {"folders": {"/dev": ("dxg",), "/usr/lib/wsl/lib": ("libd3d12.so",)}},
}


@pytest.mark.parametrize("answers", SIGNS.values(), ids=SIGNS)
def test_a_gpu_whose_driver_fails_is_one_that_cannot_be_used(answers):
    seen = mismatched(**answers)
    assert [each.kind for each in seen.unusable] == [DeviceKind.CUDA]
    assert "driver and library versions differ" in seen.unusable[0].text


@pytest.mark.parametrize("answers", NO_SIGNS.values(), ids=NO_SIGNS)
def test_without_a_sign_of_a_gpu_a_driver_that_fails_is_nobodys_loss(answers):
    assert mismatched(**answers) == Findings()


@pytest.mark.parametrize("hiding", ["", "-1", "none", "NoDevFiles"])
def test_a_gpu_that_is_hidden_on_purpose_is_not_missed(hiding):
    for seen in (
        mismatched(**on_the_bus(), variables={"CUDA_VISIBLE_DEVICES": hiding}),
        probe(A, CUDA_VISIBLE_DEVICES=hiding),
    ):
        assert (seen.devices, seen.unusable, len(seen.notes)) == ((), (), 1)


@pytest.mark.parametrize("missed", ["7", "0,0", "GPU-zzzz", "MIG-gone"])
def test_a_gpu_that_is_named_and_not_there_is_missed(missed):
    seen = probe(A, CUDA_VISIBLE_DEVICES=missed)
    assert (seen.devices, seen.notes) == ((), ())
    assert missed in seen.unusable[0].text


def test_a_gpu_that_nouveau_drives_says_so():
    said = mismatched(**on_the_bus(driver="nouveau")).unusable[0].text
    assert "nouveau" in said
    assert "nouveau" not in mismatched(**on_the_bus()).unusable[0].text


class Trouble(NvmlReplay):
    """NVML in which some functions fail."""

    def __init__(self, *failing, code=15, gpus=(A,)):
        super().__init__(NvmlSnapshot("580.1", tuple(gpus)))
        self._failing, self._code = failing, code

    def __getattr__(self, name):
        if name in self._failing:
            raise NvmlError(self._code)
        return super().__getattr__(name)


@pytest.mark.parametrize(
    ("code", "why"), [(9, "not loaded"), (12, "not installed"), (18, "reboot"), (99, "error 99")]
)
def test_nvml_that_does_not_open_says_why(code, why):
    snapshot = read_nvml(Trouble("nvmlInit", code=code))
    assert snapshot.devices == ()
    assert why in snapshot.notes[0]


def test_a_gpu_that_vanishes_while_it_is_probed_is_left_out_with_a_note():
    gone = Trouble("nvmlDeviceGetName", "nvmlDeviceGetCudaComputeCapability")
    snapshot = read_nvml(gone)
    assert snapshot.devices == ()
    assert any("error 15" in note for note in snapshot.notes)
    assert read_nvml(Trouble("nvmlDeviceGetHandleByIndex")).devices == ()
    assert read_nvml(Trouble("nvmlDeviceGetCount")).devices == ()


def test_what_is_not_supported_is_left_empty():
    snapshot = read_nvml(Trouble("nvmlDeviceGetMemoryInfo", code=3))
    assert snapshot.devices[0].memory_bytes is None
    assert len(snapshot.notes) == 1


def test_a_gpu_without_a_capability_is_kept_by_its_name():
    snapshot = read_nvml(Trouble("nvmlDeviceGetCudaComputeCapability"))
    assert snapshot.devices[0].compute_capability == ""


def test_an_instance_slot_that_is_empty_is_passed_over():
    class Holes(NvmlReplay):
        def __getattr__(self, name):
            found = super().__getattr__(name)
            if name == "nvmlDeviceGetMaxMigDeviceCount":
                return lambda handle: 5
            if name == "nvmlDeviceGetName":
                return lambda handle: handle.name
            return found

    snapshot = read_nvml(Holes(NvmlSnapshot("1", (SPLIT,))))
    assert [part.uuid for part in snapshot.devices[0].instances] == ["MIG-1111", "MIG-2222"]


def test_a_shutdown_that_fails_changes_nothing():
    assert read_nvml(Trouble("nvmlShutdown")).devices == (A,)


def test_text_may_be_bytes_or_not():
    class Texts(NvmlReplay):
        def __getattr__(self, name):
            if name == "nvmlDeviceGetName":
                return lambda handle: "plain"
            return super().__getattr__(name)

    assert read_nvml(Texts(NvmlSnapshot("1", (A,)))).devices[0].name == "plain"
