"""What /proc/cpuinfo, py-cpuinfo and the board tell of a CPU."""

import pytest

from autoprec.core.device.merging import merge
from autoprec.core.device.policies import propose
from autoprec.core.dtypes import Policy
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.probes.cpu import probe_cpu
from benchmarks.recordings.machine_replay import synthetic_machine as machine


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
