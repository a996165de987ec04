"""The shell of docs/scale.md runs as it stands there, on several ranks and on local clusters.

A Ray cluster, SLURM and SkyPilot are programs on this machine, GPUs are pretended, and what is
tuned is the simulated model, which trains on anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from rehearsal import T4, Gpu, Rehearsal

from autoprec.profiles import load_folder, load_profile
from tests.code_blocks import block, commands_in
from tests.fleet.local_cluster import LocalCluster
from tests.fleet.local_sky import LocalSky
from tests.fleet.local_slurm import LocalSlurm
from tests.processes import undisturbed

pytestmark = [pytest.mark.scale, pytest.mark.slow]

GPUS = {
    "A100": Gpu("NVIDIA A100-SXM4-40GB", "8.0"),
    "L4": Gpu("NVIDIA L4", "8.9"),
    "T4": T4,
}
TASK = """
from simulated import SimulatedModel
from simulated.backend import SimulatedBackend
from autoprec.core.device.observation import DeviceKind

SimulatedBackend.devices = lambda self: ["cpu", "cuda"]
SimulatedBackend.built_for = lambda self: (DeviceKind.CUDA,)

def build_model():
    return SimulatedModel(per_sample={"float32": 0.0005, "mixed_bfloat16": 0.0002})

def build_data(batch_size):
    return []
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the folder that a reader of the page is in."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "model.py").write_text(TASK)
    return folder


def pretended(folder: Path, gpu: Gpu) -> dict[str, str]:
    """Return what a node with this GPU has in its environment, and other nodes have not."""
    folder.mkdir()
    given = Rehearsal(folder, "cuda", gpus=[gpu]).variables()
    return {name: value for name, value in given.items() if os.environ.get(name) != value}


def shell(script: str, folder: Path, variables: Mapping[str, str]) -> str:
    """Run a script where our commands are installed and no package index is asked; return stdout.

    `pip install` finds everything that it is told to install in this environment.
    """
    programs = os.path.dirname(sys.executable)
    given = {
        **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        "AUTOPREC_REHEARSAL": "1",
        "PIP_NO_INDEX": "1",
        **undisturbed(),
        **variables,
    }
    given["PATH"] = os.pathsep.join([programs, given["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "does not provide the extra" not in done.stderr
    return done.stdout


def tuned_for(folder: Path) -> set[str]:
    """Return the names of the devices that a folder has profiles of."""
    return {each.device.name for each in load_folder(folder).values()}


def test_one_job_on_several_devices(job: Path, tmp_path: Path) -> None:
    engines = []
    for command in commands_in(block("docs/scale.md", 0)):
        shell(command, job, {"TMPDIR": str(tmp_path)})
        profile = load_profile(job / "model.profile.yaml")
        assert profile.recipe.distributed is not None
        assert profile.recipe.distributed.world_size == 2
        engines.append(profile.recipe.distributed.engine)
    assert engines == ["ddp", "fsdp2", "ddp"]


@pytest.fixture
def slurm(tmp_path: Path) -> LocalSlurm:
    nodes = {name: pretended(tmp_path / name, GPUS[name.upper()]) for name in ("a100", "l4")}
    return LocalSlurm(tmp_path / "slurm", nodes)


@pytest.fixture
def ray_node(tmp_path: Path) -> Iterator[LocalCluster]:
    """A Ray cluster of one node, which has a CPU only."""
    made = LocalCluster(tmp_path / "cluster")
    try:
        made.add("amd-zen4", cpus=2)
        yield made
    finally:
        made.close()


def test_a_mixed_cluster_by_ray_and_by_slurm(
    job: Path, slurm: LocalSlurm, ray_node: LocalCluster
) -> None:
    """The only thing put in is the address of the cluster that is really there."""
    commands = commands_in(block("docs/scale.md", 4))
    given = {**slurm.variables(), "RAY_ADDRESS": ray_node.address, "TMPDIR": str(job.parent)}
    ours = {name: value for name, value in ray_node.variables().items() if "RAY" in name}
    script = "\n".join(commands)
    assert script.count("10.0.0.1:6379") == 1
    script = script.replace("10.0.0.1:6379", ray_node.address)
    shown = shell(script, job, given | ours)
    names = {GPUS[name].name for name in ("A100", "L4")}
    assert names < tuned_for(job / "model.profiles")
    assert len(tuned_for(job / "model.profiles")) == 3
    for name in (*names, "1.8", "0.55"):
        assert name in shown
    assert {each["options"]["partition"] for each in slurm.jobs()} == {"a100", "l4"}


def test_slurm_gets_what_its_variables_say(job: Path, slurm: LocalSlurm) -> None:
    (command,) = commands_in(block("docs/scale.md", 5))
    shell(command, job, {**slurm.variables(), "TMPDIR": str(job.parent)})
    assert tuned_for(job / "model.profiles") == {GPUS[name].name for name in ("A100", "L4")}
    for each in slurm.ended_jobs():
        assert each["variables"]["SLURM_ACCOUNT"] == "vision"
        assert each["variables"]["SLURM_GRES"] == "gpu:1"
        assert each["state"] == "COMPLETED"
        assert "exclusive" in each["options"]
    assert any((job / "model.studies" / "jobs").glob("*.log"))


def test_the_kubernetes_job_writes_its_profile_and_resumes(job: Path, tmp_path: Path) -> None:
    """What its container runs is run, on the GPU that its node's label names."""
    manifest = yaml.safe_load(block("docs/scale.md", 6))
    assert (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "Job")
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted.keys() == {each["name"] for each in pod["volumes"]}
    assert mounted["work"] == container["workingDir"]
    (label,) = pod["nodeSelector"].values()
    (gpu,) = [each for each in GPUS.values() if each.name.replace(" ", "-") == label]
    node = pretended(tmp_path / "node", gpu)
    programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    (job / "fleet").mkdir()
    for trials in (True, False):
        done = subprocess.run(
            [*container["command"], *container["args"]],
            cwd=job,
            env={**os.environ, **node, "PATH": programs},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("trial  1" in done.stderr) is trials
    assert tuned_for(job / "fleet") == {gpu.name}


def test_a_loop_over_clouds_fetches_a_profile_of_each_type(job: Path, tmp_path: Path) -> None:
    sky = LocalSky(
        tmp_path / "sky", {name: pretended(tmp_path / name, gpu) for name, gpu in GPUS.items()}
    )
    script = "\n".join(commands_in(block("docs/scale.md", 7)))
    shown = shell(script, job, {**sky.variables(), "TMPDIR": str(tmp_path)})
    assert tuned_for(job / "fleet") == {gpu.name for gpu in GPUS.values()}
    assert sky.clusters() == []
    for price in ("3.67", "0.7", "0.35"):
        assert price in shown
