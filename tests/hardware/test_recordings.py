"""Every recording, replayed whole: the family, the supports and the first candidate expected."""

from pathlib import Path

import pytest

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.device.facts import Evidence
from autoprec.core.device.family import Support
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.merging import merge, with_measurements
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import propose
from autoprec.core.dtypes import DType, Policy
from autoprec.hardware.catalogue import load_catalogue, profiles_folder
from autoprec.hardware.probes.observe import observe
from benchmarks.recordings.machine_replay import RecordedMachine, Recording, read_recording

PATHS = sorted((profiles_folder() / "recordings").glob("*.json"))
REQUIRED = [
    "amd-mi250",
    "amd-mi300x",
    "amd-zen2",
    "amd-zen4",
    "apple-m2",
    "arm-graviton3",
    "generic-cpu",
    "intel-sapphire-rapids",
    "intel-sapphire-rapids.no-tiles",
    "nvidia-a100-sxm4-40gb",
    "nvidia-h100-sxm",
    "nvidia-p100-pcie-16gb",
    "nvidia-rtx-4090",
    "nvidia-t4",
    "nvidia-v100-sxm2",
    "tpu-v4",
]


def replay(path: Path):
    recording = read_recording(path)
    seen = observe(RecordedMachine(recording))
    family = load_catalogue().family_of(seen.devices[0])
    return recording, seen, merge(seen.devices[0], family)


def named(name: str):
    return replay(profiles_folder() / "recordings" / f"{name}.json")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_recording_gives_what_is_expected_of_it(path):
    recording, _, facts = replay(path)
    proposal = propose(facts)
    assert facts.family == path.name.split(".")[0]
    assert {d: facts.fact(d).support for d in recording.expect.support} == recording.expect.support
    assert proposal.recommended is recording.expect.policy


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_timings_refuse_on_a_cpu_only_what_they_show_to_be_no_faster(path):
    cpu = observe(RecordedMachine(read_recording(path))).devices[-1]
    facts = merge(cpu, load_catalogue().family_of(cpu))
    halves = {Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16}
    for rate, refused in ((1.0, True), (91.0, True), (92.0, False), (130.0, False)):
        rates = {DType.FLOAT32: 100.0, DType.BFLOAT16: rate, DType.FLOAT16: rate}
        products = tuple(Product(dtype, gflops=gflops) for dtype, gflops in rates.items())
        proposal = propose(with_measurements(facts, Measurements("torch", products)))
        assert halves.intersection(proposal.policies) == (set() if refused else halves)
        assert (proposal.recommended is Policy.FLOAT32) is (rate < 130.0)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_no_machine_printed_says_so(path):
    recording = read_recording(path)
    assert recording.note
    assert recording.synthetic == recording.note.startswith("Made by hand: ")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_last_device_is_the_cpu(path):
    _, seen, _ = replay(path)
    assert seen.devices[-1].kind is DeviceKind.CPU
    assert [device.kind for device in seen.devices].count(DeviceKind.CPU) == 1


def test_a_recording_survives_being_written_and_read():
    recording = read_recording(PATHS[0])
    assert from_plain(Recording, to_plain(recording)) == recording


def test_the_machines_that_must_be_there_are():
    assert set(REQUIRED) <= {path.stem for path in PATHS}


def test_at_least_one_machine_is_a_real_one():
    assert any(not read_recording(path).synthetic for path in PATHS)


def test_amx_whose_tiles_are_denied_is_refused_as_evidence():
    _, _, facts = named("intel-sapphire-rapids.no-tiles")
    assert facts.observation.denied == {"amx_tile", "amx_bf16", "amx_int8"}
    assert facts.fact(DType.BFLOAT16).reason.startswith("has avx512_bf16")
    _, _, facts = named("intel-sapphire-rapids.no-tiles-no-avx512bf16")
    refusals = {refusal.candidate: refusal.reason for refusal in propose(facts).refusals}
    assert "advertises amx_bf16 but the system denies its use" in refusals["mixed_bfloat16"]
    assert facts.fact(DType.BFLOAT16).evidence is Evidence.PROBED


def test_both_dies_of_an_mi250_are_devices():
    _, seen, _ = named("amd-mi250")
    assert [(d.kind, d.index) for d in seen.devices[:-1]] == [
        (DeviceKind.ROCM, 0),
        (DeviceKind.ROCM, 1),
    ]
    assert seen.devices[0].memory_bytes == 64 * 2**30


def test_a_network_card_of_the_same_vendor_is_no_tpu():
    _, seen, _ = named("tpu-v4")
    assert [d.kind for d in seen.devices].count(DeviceKind.TPU) == 4


def test_an_instance_of_a_split_gpu_has_its_own_memory_and_no_peaks():
    _, seen, facts = named("nvidia-a100-sxm4-40gb.mig")
    assert seen.devices[0].uuid == "MIG-00000000-0001"
    assert seen.devices[0].memory_bytes == 5 * 2**30
    assert facts.fact(DType.BFLOAT16).peak_dense_tflops is None
    assert facts.fingerprint.memory_gib == 5


def test_the_memory_of_a_gpu_that_has_none_of_its_own_is_left_to_the_framework():
    _, seen, facts = named("nvidia-gb10")
    assert seen.devices[0].memory_bytes is None
    assert any("shares the CPU's memory" in note for note in facts.notes)


@pytest.mark.parametrize("name", ["amd-rdna3-5", "apple-m2-max"])
def test_what_is_set_apart_of_shared_memory_is_not_taken_for_the_gpus(name):
    _, seen, facts = named(name)
    assert seen.devices[0].memory_bytes is not None
    assert facts.observation.memory_bytes is None
    assert facts.fingerprint.memory_gib == 0
    assert any("shares the CPU's memory" in note for note in facts.notes)


def test_a_gpu_with_memory_of_its_own_keeps_it():
    _, _, facts = named("amd-rx-7900-xtx")
    assert facts.observation.memory_bytes == 24 * 2**30
    assert not any("shares" in note for note in facts.notes)


def test_a_gpu_that_cannot_be_used_is_a_note():
    _, seen, _ = named("intel-skylake-sp.gpu-without-driver")
    assert not any("NVIDIA" in note for note in seen.notes)
    assert [each.kind for each in seen.unusable] == [DeviceKind.CUDA]
    assert "this machine has an NVIDIA GPU that cannot be used" in seen.unusable[0].text
    _, seen, _ = named("intel-skylake-sp.hidden-gpu")
    assert "hides all 1 NVIDIA GPUs" in seen.notes[0]
    assert seen.unusable == ()


def test_a_half_core_and_a_limit_of_a_group_above_are_seen():
    _, seen, facts = named("amd-zen3.half-a-core")
    assert seen.devices[0].core_quota == 0.5
    assert facts.fingerprint.memory_gib == 2


def test_a_gtx_16_has_the_capability_of_a_t4_and_not_its_tensor_cores():
    _, _, facts = named("nvidia-turing-gtx16")
    assert facts.fact(DType.FLOAT16).support is Support.UNKNOWN
    assert propose(facts).policies == (Policy.FLOAT32, Policy.MIXED_FLOAT16)


def test_a_jetson_without_nvml_is_seen_by_cudas_word():
    _, seen, facts = named("nvidia-jetson-thor.without-nvml")
    assert (facts.name, seen.devices[0].compute_capability) == ("NVIDIA Thor", "11.0")
    assert seen.devices[0].memory_bytes is None
    assert seen.unusable == ()


def test_the_intel_gpu_in_a_cpu_is_not_the_discrete_one_beside_it():
    _, seen, _ = named("intel-arc-a770.beside-integrated")
    assert [device.uuid for device in seen.devices[:-1]] == ["0000:03:00.0"]
    assert any("only discrete ones" in note for note in seen.notes)


def test_a_mac_whose_python_rosetta_translates_says_so():
    _, seen, _ = named("generic-x86.translated-by-rosetta")
    assert [device.kind for device in seen.devices] == [DeviceKind.CPU]
    assert "Rosetta" in seen.unusable[0].text
