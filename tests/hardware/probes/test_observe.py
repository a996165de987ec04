"""What must hold of observing: whatever fails, there is an answer with a CPU and a note."""

import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.probe_result import Unusable
from autoprec.core.dtypes import Policy
from autoprec.errors import UsageError
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes import observe as observing
from autoprec.hardware.probes.nvml import NvmlDevice, NvmlSnapshot
from autoprec.hardware.probes.observe import _PROBES as PROBES
from autoprec.hardware.probes.observe import observe, select
from benchmarks.recordings.machine_recorder import Recorder
from benchmarks.recordings.machine_replay import Expectation, Package, RecordedMachine
from benchmarks.recordings.machine_replay import synthetic_machine as machine
from benchmarks.recordings.record import main as record_main
from benchmarks.recordings.record import record


class Broken(RecordedMachine):
    """A machine on which everything that is asked fails."""

    def read(self, path):
        raise OSError("input/output error")

    entries = variable = command = has_package = nvml = cpuid = processors = read
    usable_processors = physical_memory = tiles_permitted = read

    def __getattribute__(self, name):
        return super().__getattribute__(name)


def test_a_machine_that_fails_everywhere_still_has_a_cpu():
    seen = observe(Broken(machine()._recording))
    assert [device.kind for device in seen.devices] == [DeviceKind.CPU]
    assert any("CPU: the probe failed" in note for note in seen.notes)
    assert any(note.startswith("frameworks: ") for note in seen.notes)


def test_a_rehearsal_marks_every_device_and_says_so():
    seen = observe(machine(variables={observing.REHEARSAL: "1"}))
    assert all(device.rehearsal for device in seen.devices)
    assert any("rehearsal" in note for note in seen.notes)
    assert not any(device.rehearsal for device in observe(machine()).devices)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"system": "Windows", "architecture": "AMD64"}, "Windows: only NVIDIA GPUs are detected"),
        ({"folders": {"/dev": ("dxg", "null"), "/sys": ("bus",)}}, "WSL: only NVIDIA GPUs are"),
    ],
)
def test_what_is_not_looked_at_is_said(given, said):
    assert any(note.startswith(said) for note in observe(machine(**given)).notes)
    assert not any("only NVIDIA GPUs" in note for note in observe(machine()).notes)


def test_an_empty_machine_has_a_cpu():
    assert observe(machine()).devices[0].kind is DeviceKind.CPU


def test_a_probe_that_does_not_answer_is_left_behind(monkeypatch):
    for_ever = threading.Event()
    monkeypatch.setattr(
        observing, "_PROBES", (observing.Probe("Slow", lambda _: for_ever.wait(), 0.01),)
    )
    seen = observe(machine())
    for_ever.set()
    assert any(note.startswith("Slow: no answer") for note in seen.notes)
    assert seen.devices[0].kind is DeviceKind.CPU


def test_a_driver_that_takes_its_time_is_waited_for_and_told_of(monkeypatch):
    asked, told = threading.Event(), []

    def slow(_):
        asked.wait(60)
        return Findings((Observation(kind=DeviceKind.CUDA),))

    def on_wait(text):
        told.append(text)
        asked.set()

    monkeypatch.setattr(observing, "_SILENT_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(observing, "_PROBES", (observing.Probe("Slow", slow, 60.0),))
    seen = observe(machine(), on_wait)
    assert told == ["Slow: waiting for the driver, at most 60 seconds"]
    assert seen.devices[0].kind is DeviceKind.CUDA
    assert next(each.seconds for each in PROBES if each.name == "NVIDIA") >= 60


@pytest.mark.parametrize("wanted", [True, False])
def test_a_driver_that_does_not_answer_has_a_gpu_that_cannot_be_used(monkeypatch, wanted):
    for_ever = threading.Event()
    for run in (lambda _: for_ever.wait(), lambda _: 1 // 0):
        probe = observing.Probe("Slow", run, 0.01, DeviceKind.CUDA, lambda _: wanted)
        monkeypatch.setattr(observing, "_PROBES", (probe,))
        seen = observe(machine())
        texts = [each.text for each in seen.unusable if each.kind is DeviceKind.CUDA]
        assert any(text.startswith("Slow: ") for text in texts) == wanted
        assert any(note.startswith("Slow: ") for note in seen.notes) != wanted
    for_ever.set()


@pytest.mark.parametrize("kind", [DeviceKind.CUDA, DeviceKind.ROCM])
def test_nvidias_and_amds_drivers_are_those_that_can_be_waited_for_in_vain(kind):
    (probe,) = [each for each in PROBES if each.kind is kind]
    vendor = {DeviceKind.CUDA: "10de", DeviceKind.ROCM: "1002"}[kind]
    files = {
        "/sys/bus/pci/devices/0/vendor": f"0x{vendor}",
        "/sys/bus/pci/devices/0/class": "0x030200",
    }
    assert probe.expected(machine(files=files))
    assert not probe.expected(machine(files=files, variables={"CUDA_VISIBLE_DEVICES": ""}))
    assert not probe.expected(machine())


def test_this_very_machine_is_observed_without_failures():
    seen = observe()
    assert seen.devices[-1].kind is DeviceKind.CPU
    assert seen.system
    assert not any("the probe failed" in note for note in seen.notes)


def a_machine_with_a_gpu():
    gpu = NvmlDevice(
        uuid="GPU-secret", name="Tesla T4", compute_capability="7.5", memory_bytes=2**34
    )
    return machine(
        files={"/proc/meminfo": "MemTotal: 8388608 kB\n"}, nvml=NvmlSnapshot("1", (gpu,))
    )


@pytest.mark.parametrize(("asked", "gpus"), [(Machine, 0), (a_machine_with_a_gpu, 1)])
def test_a_recording_of_a_machine_replays_exactly_but_for_uuids(asked, gpus):
    recorder = Recorder(asked())
    seen = observe(recorder)
    recording = recorder.recording("this one", Expectation(Policy.FLOAT32))
    assert not recording.synthetic
    again = observe(RecordedMachine(recording))
    assert len(seen.devices) > gpus
    for ours, theirs in zip(again.devices, seen.devices, strict=True):
        assert replace(ours, uuid="") == replace(theirs, uuid="")
        assert bool(ours.uuid) == bool(theirs.uuid)
    assert replace(again, devices=()) == replace(seen, devices=())


def test_a_recording_shows_neither_a_gpu_that_was_chosen_nor_what_a_package_is_written_like():
    chosen = replace(
        a_machine_with_a_gpu()._recording,
        variables={"CUDA_VISIBLE_DEVICES": "GPU-secret"},
        packages={
            "torch": Package(
                {
                    "version.py": "import os\n__version__: str = '2.11.0'\ncuda = '13.0'\n"
                    "_date = os.environ['BUILD']\ndef version():\n  v = 'theirs'\n"
                }
            )
        },
    )
    recorder = Recorder(RecordedMachine(chosen))
    seen = observe(recorder)
    recording = recorder.recording("this one", Expectation(Policy.FLOAT32))
    again = observe(RecordedMachine(recording))
    assert "secret" not in str(to_plain(recording))
    assert recording.packages["torch"].files == {
        "version.py": "__version__: str = '2.11.0'\ncuda = '13.0'\n"
    }
    assert again.frameworks == seen.frameworks
    assert [device.kind for device in again.devices] == [DeviceKind.CUDA, DeviceKind.CPU]


def test_a_recorder_passes_every_answer_on(monkeypatch):
    files = {
        "/proc/self/cgroup": "0::/user/secret\n",
        "/proc/self/mountinfo": (
            "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 c rw\n1 1 0:1 / /home rw - ext4 x rw\n"
        ),
        "/sys/fs/cgroup/user/secret/memory.max": "1073741824\n",
        "/proc/meminfo": "MemTotal: 8388608 kB\n",
        "/proc/cpuinfo": "processor: 0\nflags: amx_bf16\n\n",
    }
    snapshot = {
        "driver": "1",
        "devices": [
            {
                "uuid": "GPU-secret",
                "name": "Tesla T4",
                "compute_capability": "7.5",
                "memory_bytes": 1,
                "mig": True,
                "instances": [{"uuid": "MIG-secret", "memory_bytes": 1}],
            }
        ],
    }
    original = machine(files=files, tiles_permitted=False, nvml=from_plain(NvmlSnapshot, snapshot))
    recorder = Recorder(original)
    seen = observe(recorder)
    recording = recorder.recording("a note", Expectation(Policy.FLOAT32))
    again = observe(RecordedMachine(recording))
    assert again.devices[-1] == seen.devices[-1]
    assert again.devices[-1].memory_bytes == 2**30
    assert "secret" not in str(to_plain(recording))
    assert "/home" not in str(to_plain(recording))


def test_of_the_files_in_dev_only_an_accelerators_are_written_down():
    names = ("dm-0", "dxg", "kfd", "nvidia0", "nvmap", "sda", "vg-of-a-person")
    recorder = Recorder(machine(folders={"/dev": names}))
    assert recorder.entries("/dev") == ("dxg", "kfd", "nvidia0", "nvmap")
    recording = recorder.recording("", Expectation(Policy.FLOAT32))
    assert recording.folders == {"/dev": ("dxg", "kfd", "nvidia0", "nvmap")}


def test_recording_this_machine_names_the_family_it_was_taken_for(capsys, monkeypatch):
    family, recording = record("here")
    assert family
    assert recording.note == "here"
    monkeypatch.setattr("sys.argv", ["record", "here"])
    assert record_main() == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("{")
    assert family in printed.err
    monkeypatch.setattr("sys.argv", ["record"])
    assert record_main() == 2


DEVICES = (
    Observation(DeviceKind.CUDA, index=0),
    Observation(DeviceKind.CUDA, index=1),
    Observation(DeviceKind.CPU),
)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(None, DEVICES), ("cuda", DEVICES[:2]), (" CUDA:1 ", DEVICES[1:2]), ("cpu:0", DEVICES[2:])],
)
def test_devices_are_chosen_by_kind_and_index(chosen, expected):
    assert select(DEVICES, chosen) == expected


@pytest.mark.parametrize("chosen", ["gpu", "", "cuda:", "cuda:x", "cuda:-1", "cuda:²"])
def test_what_names_no_device_is_refused(chosen):
    with pytest.raises(UsageError, match=r"unknown device .* expected KIND"):
        select(DEVICES, chosen)


def test_a_device_that_cannot_be_used_is_refused_with_the_reason():
    unusable = (Unusable(DeviceKind.TPU, "a chip fell off"), Unusable(DeviceKind.XPU, "another"))
    with pytest.raises(UsageError, match=r"no device 'tpu' here: found .*; a chip fell off$"):
        select(DEVICES, "tpu", unusable)


@pytest.mark.parametrize("chosen", ["tpu", "cuda:2"])
def test_a_device_that_is_not_here_is_refused_with_those_that_are(chosen):
    with pytest.raises(UsageError, match="found cuda:0, cuda:1, cpu:0"):
        select(DEVICES, chosen)


@settings(deadline=None)
@given(
    files=st.dictionaries(
        st.sampled_from(
            [
                "/proc/cpuinfo",
                "/proc/meminfo",
                "/proc/self/cgroup",
                "/proc/self/mountinfo",
                "/sys/fs/cgroup/cpu.max",
                "/sys/class/kfd/kfd/topology/nodes/1/properties",
                "/sys/bus/pci/devices/0/vendor",
                "/sys/bus/pci/devices/0/class",
            ]
        ),
        st.text() | st.sampled_from(["simd_count 9\n", "0x1ae0", "processor: 1\n\n"]),
    )
)
def test_files_full_of_rubbish_crash_no_probe(files):
    seen = observe(machine(files=files))
    assert not any("the probe failed" in note for note in seen.notes)


def test_the_local_machine_answers_or_says_nothing(tmp_path):
    here = Machine()
    assert here.read(str(tmp_path / "missing")) is None
    assert here.entries(str(tmp_path / "missing")) == ()
    assert here.command("no-such-command-anywhere") is None
    assert here.command(sys.executable, "-c", "print(1)") == "1\n"
    assert here.has_package("yaml")
    assert not here.has_package("no_such_package")
    assert not here.has_package("no_such_package.inner")
    assert here.package_file("yaml", "__init__.py")
    assert here.package_file("no_such_package", "x") is None
    assert here.distribution_version("pyyaml")
    assert here.distribution_version("no-such-distribution") is None
    assert here.physical_memory()
    has_tiles = "amx_tile" in (here.read("/proc/cpuinfo") or "").split()
    assert bool(here.tiles_permitted()) <= has_tiles, "what the CPU has not is not permitted"
    assert here.nvml().__name__ == "pynvml"


def test_asking_about_packages_imports_no_framework():
    import subprocess
    import sys

    script = (
        "import sys; from autoprec.hardware.probes.observe import observe; observe();"
        "print([n for n in ('torch', 'tensorflow', 'keras', 'jax', 'optuna') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
