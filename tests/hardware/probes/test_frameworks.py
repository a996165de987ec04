"""Frameworks are found, with their versions, without importing them."""

from autoprec.core.device.probe_result import FrameworkFact
from autoprec.hardware.probes.frameworks import find_frameworks
from benchmarks.recordings.machine_replay import Package
from benchmarks.recordings.machine_replay import synthetic_machine as machine


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
