"""A Mac's GPU and CPU through sysctl, also where Rosetta translates."""

from autoprec.core.device.observation import DeviceKind
from autoprec.hardware.probes.apple import probe_apple
from autoprec.hardware.probes.cpu import probe_cpu
from benchmarks.recordings.machine_replay import synthetic_machine as machine

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
