"""What must hold where CUDA's driver is asked: it is exact, in a child, and in bounded time.

The library is a stand-in that the tests compile (libcuda.c), the answers are made up.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autoprec.core.codec import to_plain
from autoprec.core.dtypes import Policy
from autoprec.hardware import machine as machines
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes.nvidia import CudaAnswer, CudaDevice, probe_nvidia, read_cuda
from autoprec.hardware.probes.nvml import NvmlDevice, NvmlInstance, NvmlSnapshot
from autoprec.hardware.probes.observe import observe
from benchmarks.recordings.machine_recorder import Recorder
from benchmarks.recordings.machine_replay import Expectation, RecordedMachine
from benchmarks.recordings.machine_replay import synthetic_machine as machine

GIB = 2**30
A = NvmlDevice("GPU-aaaa-1", "NVIDIA A100-SXM4-40GB", "8.0", 40 * GIB)
T4 = NvmlDevice("GPU-bbbb-2", "Tesla T4", "7.5", 15 * GIB)
PARTS = (NvmlInstance("MIG-1111", "MIG 3g.20gb", 20 * GIB), NvmlInstance("MIG-2222", "", 1))
SPLIT = NvmlDevice("GPU-dddd-4", "NVIDIA A100-SXM4-40GB", "8.0", 40 * GIB, True, PARTS)
ORIN = CudaDevice("Orin", "8.7", True, "0f0f", memory_bytes=60 * GIB)
SORTS = NvmlSnapshot("580", (A, T4))
JETSON = {"folders": {"/dev": ("nvhost-gpu", "nvmap")}}


def cuda(*devices, **answer):
    return CudaAnswer("13.0", devices, **answer)


def shown_as(gpu, **changes):
    return CudaDevice(
        gpu.name, gpu.compute_capability, False, gpu.uuid.partition("-")[2], **changes
    )


# The library, in a child --------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Compile the stand-in and put it where the child's loader finds it."""

    def build(result=0, seconds=0, *flags):
        compiler = shutil.which(os.environ.get("CC", "cc"))
        source = Path(__file__).with_name("libcuda.c")
        given = [f"-DINIT_RESULT={result}", f"-DSECONDS={seconds}", *flags]
        target = ["-o", tmp_path / "libcuda.so.1"]
        subprocess.run([compiler, "-shared", "-fPIC", *given, source, *target], check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        return Machine()

    return build


linux = pytest.mark.skipif(sys.platform != "linux", reason="the loader's variable is Linux's")


@linux
def test_the_library_tells_every_device_in_its_order(library):
    answer = read_cuda(library())
    assert (answer.version, answer.error) == ("12.8", "")
    thor, part = answer.devices
    assert (thor.model, thor.partition, thor.compute_capability) == ("NVIDIA Thor", "", "11.0")
    assert (thor.integrated, thor.memory_bytes) == (True, 7 << 32)
    assert thor.identifier == "GPU-71717171-7171-7171-7171-717171717171"
    assert (part.model, part.partition) == ("NVIDIA A100", "3g.20gb")
    assert part.identifier == "MIG-81818181-8181-8181-8181-818181818181"


@linux
def test_what_an_older_library_lacks_is_left_empty(library):
    first, _ = read_cuda(library(0, 0, "-DOLD")).devices
    assert (first.identifier, first.memory_bytes) == ("", 7 << 32)


@linux
@pytest.mark.parametrize(
    ("code", "why"), [(803, "unsupported display driver.*CUDA error 803"), (100, "CUDA error 100")]
)
def test_a_library_that_does_not_start_says_why(library, code, why):
    answer = read_cuda(library(code))
    assert answer.devices == ()
    assert re.search(f"cuInit: .*{why}", answer.error)


@linux
def test_a_library_that_never_answers_is_left_behind(library, monkeypatch):
    monkeypatch.setattr(machines, "_CUDA_TIMEOUT_SECONDS", 0.5)
    assert "no answer in 0.5 seconds" in read_cuda(library(0, 60)).error


@linux
def test_this_process_stays_without_it(library):
    read_cuda(library())
    assert "libcuda" not in Path("/proc/self/maps").read_text()


def test_a_child_that_fails_is_an_answer_too(monkeypatch, tmp_path):
    for text in ("raise SystemExit(3)", "print('noise')"):
        broken = tmp_path / "child.py"
        broken.write_text(text)
        monkeypatch.setattr(machines, "_CUDA_CHILD", broken)
        assert "could not be queried" in read_cuda(Machine()).error


def test_an_answer_that_cannot_be_read_is_none():
    class Odd(RecordedMachine):
        def cuda(self):
            return {"devices": 5}

    assert "could not be parsed" in read_cuda(Odd(machine()._recording)).error


# Where it is asked --------------------------------------------------------------------------------


class Asked(RecordedMachine):
    """A machine that counts how often CUDA's driver is asked."""

    times = 0

    def cuda(self):
        self.times += 1
        return super().cuda()


def asked(**answers):
    found = Asked(machine(**answers)._recording)
    return probe_nvidia(found), found.times


@pytest.mark.parametrize(
    ("answers", "times"),
    [
        ({}, 0),
        ({"nvml": NvmlSnapshot("580", (A, A))}, 0),
        ({**JETSON, "variables": {"CUDA_VISIBLE_DEVICES": ""}}, 0),
        (
            {
                "nvml": NvmlSnapshot("580", (A, T4)),
                "variables": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            },
            0,
        ),
        (JETSON, 1),
        ({"nvml": SORTS}, 1),
        ({"nvml": NvmlSnapshot("580", (SPLIT,))}, 1),
        ({"nvml": NvmlSnapshot("580", (NvmlDevice("GPU-x", "a GPU"),))}, 1),
    ],
)
def test_only_a_machine_with_a_doubt_pays_for_the_answer(answers, times):
    assert asked(**answers)[1] == times


def test_without_nvml_cudas_word_is_taken():
    seen, _ = asked(**JETSON, cuda=cuda(ORIN))
    (device,) = seen.devices
    assert (device.name, device.compute_capability, device.driver) == ("Orin", "8.7", "CUDA 13.0")
    assert (device.uuid, device.memory_bytes, seen.unusable) == ("", None, ())
    assert "shares the CPU's memory" in device.notes[0]
    assert "used CUDA's driver instead" in seen.notes[0]


def test_without_nvml_several_devices_are_told_apart():
    seen, _ = asked(**JETSON, cuda=cuda(shown_as(T4, memory_bytes=15 * GIB), shown_as(A)))
    assert [device.uuid for device in seen.devices] == [T4.uuid, A.uuid]
    assert seen.devices[0].memory_bytes == 15 * GIB


def test_where_cuda_fails_too_its_reason_is_told():
    seen, _ = asked(**JETSON, cuda=cuda(error="cuInit: no CUDA-capable device is detected"))
    assert "no CUDA-capable device" in seen.unusable[0].text


def test_gpus_of_several_sorts_are_numbered_as_cuda_numbers_them():
    snapshot = NvmlSnapshot("580.1", (T4, A))
    seen, _ = asked(nvml=snapshot, cuda=cuda(shown_as(A), shown_as(T4)))
    assert [(d.index, d.uuid, d.name) for d in seen.devices] == [
        (0, A.uuid, A.name),
        (1, T4.uuid, T4.name),
    ]
    assert [d.memory_bytes for d in seen.devices] == [A.memory_bytes, T4.memory_bytes]
    assert seen.notes == ()
    silent, _ = asked(nvml=snapshot, cuda=cuda(error="no answer"))
    assert [d.uuid for d in silent.devices] == [T4.uuid, A.uuid]
    assert "CUDA_DEVICE_ORDER" in silent.notes[0]


def test_of_split_gpus_those_instances_are_seen_that_cuda_shows():
    second = CudaDevice("NVIDIA A100-SXM4-40GB MIG 4g.20gb", "8.0", False, "2222")
    seen, _ = asked(nvml=NvmlSnapshot("550", (SPLIT,)), cuda=cuda(second))
    (device,) = seen.devices
    assert (device.uuid, device.partition, device.memory_bytes) == ("MIG-2222", "MIG", 1)
    unknown = CudaDevice("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "8.0", False, "9", memory_bytes=5)
    seen, _ = asked(nvml=NvmlSnapshot("550", (SPLIT,)), cuda=cuda(unknown))
    (device,) = seen.devices
    assert (device.name, device.partition) == ("NVIDIA A100-SXM4-40GB", "1g.5gb")
    assert (device.uuid, device.memory_bytes) == ("MIG-9", 5)


def test_what_nvml_lacks_is_taken_from_cuda():
    bare = NvmlDevice("GPU-aaaa-1", "NVIDIA A100-SXM4-40GB", "", 40 * GIB)
    seen, _ = asked(nvml=NvmlSnapshot("580", (bare,)), cuda=cuda(shown_as(A)))
    assert seen.devices[0].compute_capability == "8.0"


def test_memory_that_is_the_cpus_is_left_to_the_framework():
    thor = NvmlDevice("GPU-aaaa-1", "NVIDIA Thor", "", 120 * GIB)
    integrated = CudaDevice("NVIDIA Thor", "11.0", True, "aaaa-1", memory_bytes=120 * GIB)
    seen, _ = asked(nvml=NvmlSnapshot("580", (thor,)), cuda=cuda(integrated))
    assert seen.devices[0].memory_bytes is None


def test_what_cuda_said_is_written_down_without_uuids():
    original = machine(
        nvml=NvmlSnapshot("580", (T4, SPLIT)),
        cuda=cuda(CudaDevice(SPLIT.name + " MIG 3g.20gb", "8.0", False, "1111"), shown_as(T4)),
    )
    recorder = Recorder(original)
    seen = observe(recorder)
    recording = recorder.recording("", Expectation(Policy.FLOAT32))
    assert "1111" not in str(to_plain(recording))
    assert "bbbb" not in str(to_plain(recording))
    again = observe(RecordedMachine(recording))
    assert [d.name for d in again.devices] == [d.name for d in seen.devices]
    assert [d.memory_bytes for d in again.devices] == [d.memory_bytes for d in seen.devices]
