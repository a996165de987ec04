"""A whole Ray cluster on this machine: nodes of three types, one without room, and their deaths."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest
from rehearsal import Gpu, Rehearsal
from rehearsal.jobs import TASKS

from autoprec.profiles import load_folder
from tests.fleet.commands import QUICK, Command, built, wait_until, write_task
from tests.fleet.local_cluster import LocalCluster

pytestmark = [pytest.mark.scale, pytest.mark.slow, pytest.mark.timeout(280)]

ZEN4, INTEL, FULL = "amd-epyc-9r14", "intel-xeon-platinum-8488c", "intel-xeon-platinum-8375c"
RESUMED = r"resuming after (\d+) finished trials"
Tune = Callable[..., Command]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path_factory.mktemp("cluster"))
    try:
        soon = {"RAY_health_check_period_ms": "1000"}  # when the head notices that a node is lost
        made.add("intel-ice-lake-sp", cpus=0, **soon)  # Ray gives it no work
        made.add("amd-zen4", cpus=2)
        made.add("intel-sapphire-rapids", cpus=1)
        yield made
    finally:
        made.close()


@pytest.fixture
def tune(cluster: LocalCluster) -> Iterator[Tune]:
    running: list[Command] = []

    def start(task: Path, *words: object, **variables: str) -> Command:
        arguments = ("tune", task, "--ray", cluster.address, *QUICK, *words)
        running.append(Command(cluster.autoprec(*arguments, **variables)))
        return running[-1]

    yield start
    for each in running:
        if each.process.poll() is None:
            each.kill()


def families(folder: Path) -> set[str]:
    return {each.device.family for each in load_folder(folder).values()}


def test_each_type_with_room_has_a_profile_and_the_other_is_named(
    cluster: LocalCluster, tune: Tune, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "a")
    first = tune(task, "--json")
    code, out = first.end()
    assert code == 0, first.text
    assert families(task.with_name("model.profiles")) == {"amd-zen4", "intel-sapphire-rapids"}
    types = {each["name"].removesuffix("-rehearsal"): each for each in json.loads(out)["types"]}
    assert {name for name, each in types.items() if each["profile"]} == {ZEN4, INTEL}
    assert "has no room: Ray counts no CPU on it" in types[FULL]["reason"]
    assert "has no room: Ray counts no CPU on it" in first.text
    lines = built(task)
    assert {line["node"] for line in lines} == {
        *cluster.nodes("amd-zen4"),
        *cluster.nodes("intel-sapphire-rapids"),
    }
    assert {line["threads"] for line in lines} == {None}  # none of those that Ray sets
    assert {line["folder"] for line in lines} == {os.path.realpath(cluster.folder)}
    again = tune(task)
    assert again.end()[0] == 0
    assert again.trials() == []


def test_a_killed_ray_worker_loses_no_finished_trial(
    cluster: LocalCluster, tune: Tune, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "b", step_seconds=0.01)
    command = tune(task)
    command.wait_for(rf"{ZEN4}\S*:   trial", count=2)
    known = command.trials(ZEN4)
    (tuner,) = {line["tuner"] for line in built(task) if line["node"] in cluster.nodes("amd-zen4")}
    os.kill(tuner, signal.SIGKILL)
    code, _ = command.end()
    assert code == 0, command.text
    assert "its Ray worker has ended; finished trials are kept" in command.text
    command.wait_for(rf"{ZEN4}\S*: .*{RESUMED}")
    assert command.trials(ZEN4)[: len(known)] == known
    assert len(command.trials(ZEN4)) == len(set(command.trials(ZEN4)))
    assert families(task.with_name("model.profiles")) == {"amd-zen4", "intel-sapphire-rapids"}


def test_a_killed_driver_loses_no_finished_trial_and_leaves_no_process(
    tune: Tune, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "c", step_seconds=0.01)
    command = tune(task)
    command.wait_for(rf"{ZEN4}\S*:   trial", count=2)
    command.kill()
    known = command.trials(ZEN4)
    started = {line[each] for line in built(task) for each in ("tuner", "worker")}
    wait_until(lambda: not any(Path(f"/proc/{each}").exists() for each in started))
    again = tune(task)
    code, _ = again.end()
    assert code == 0, again.text
    again.wait_for(rf"{ZEN4}\S*: .*{RESUMED}")
    assert not set(known) & set(again.trials(ZEN4))


def test_another_node_of_the_type_takes_over_from_one_that_is_lost(
    cluster: LocalCluster, tune: Tune, tmp_path: Path
) -> None:
    (kept,) = cluster.nodes("amd-zen4")
    added = cluster.add("amd-zen4", cpus=2)
    task = write_task(tmp_path / "d", step_seconds=0.01)
    command = tune(task)
    command.wait_for(rf"{ZEN4}\S*:   trial", count=2)
    known = command.trials(ZEN4)
    (lost,) = {line["node"] for line in built(task)} & {kept, added}
    cluster.remove(lost)
    code, _ = command.end()
    assert code == 0, command.text
    assert "the node has left the cluster; finished trials are kept" in command.text
    assert {kept, added} <= {line["node"] for line in built(task)}
    assert command.trials(ZEN4)[: len(known)] == known
    assert len(command.trials(ZEN4)) == len(set(command.trials(ZEN4)))


def test_where_the_last_node_of_a_type_is_lost_the_others_go_on_and_the_same_command_resumes(
    cluster: LocalCluster, tune: Tune, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "e", step_seconds=0.01)
    command = tune(task)
    command.wait_for(rf"{ZEN4}\S*:   trial", count=2)
    (only,) = cluster.nodes("amd-zen4")
    cluster.remove(only)
    code, _ = command.end()
    assert code == 1, command.text
    assert "no other node is of this type" in command.text
    assert families(task.with_name("model.profiles")) == {"intel-sapphire-rapids"}
    cluster.add("amd-zen4", cpus=2)
    again = tune(task)
    assert again.end()[0] == 0, again.text
    assert not set(command.trials(ZEN4)) & set(again.trials(ZEN4))
    assert families(task.with_name("model.profiles")) == {"amd-zen4", "intel-sapphire-rapids"}


def test_two_tunings_share_no_device_and_no_journal(
    cluster: LocalCluster, tune: Tune, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "f")
    (held := task.with_name("held")).touch()
    first = tune(task)
    first.wait_for("tuning on")
    second = tune(task)
    assert second.end()[0] == 1
    assert "another tuning on a cluster writes to" in second.text
    waiting = tune(task, "--wait", "--output", tmp_path / "other")
    waiting.wait_for("tuning on")
    held.unlink()
    assert first.end()[0] == 0, first.text
    assert waiting.end()[0] == 0, waiting.text
    for node in (*cluster.nodes("amd-zen4"), *cluster.nodes("intel-sapphire-rapids")):
        turns = [key for key, _ in groupby(_tuners(task, node))]
        assert len(turns) == len(set(turns)) == 2  # one after the other, never in turns


def _tuners(task: Path, node: str) -> list[int]:
    return [line["tuner"] for line in built(task) if line["node"] == node]


IMPATIENT = """
import sys
from autoprec.cli import main
from autoprec.fleet import ray_scheduler
ray_scheduler.ROOM_SECONDS = 3.0
sys.exit(main(sys.argv[1:]))
"""


def test_a_node_that_is_taken_has_no_room_and_nothing_is_left_waiting_there(
    cluster: LocalCluster, tune: Tune, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "h")
    (held := task.with_name("held")).touch()
    first = tune(task)
    wait_until(lambda: len(built(task)) == 2, 120)
    words = ("tune", task, "--ray", cluster.address, "--output", tmp_path / "other")
    second = Command(cluster.autoprec(*words, program=("-c", IMPATIENT)))
    code, _ = second.end()
    assert code == 3, second.text
    assert second.text.count("were not free within 3 seconds; wait for them with --wait") >= 2
    held.unlink()
    assert first.end()[0] == 0, first.text
    third = tune(task, "--output", tmp_path / "other")
    assert third.end()[0] == 0, third.text


def test_a_tuning_sees_all_gpus_of_its_node_and_shows_its_workers_one(
    cluster: LocalCluster, tune: Tune, tmp_path: Path
) -> None:
    card = Gpu("NVIDIA L4", "8.9", gib=4.0)
    pretended = Rehearsal(tmp_path / "gpus", "cuda", gpus=[card, card]).variables()
    shown = {name: pretended[name] for name in pretended if name.startswith("REHEARSAL")}
    node = cluster.add("amd-zen4", cpus=1, gpus=2, PYTHONPATH=pretended["PYTHONPATH"], **shown)
    (tmp_path / "i").mkdir()
    for name in ("mlp", "digits"):
        shutil.copy(TASKS / f"{name}.py", tmp_path / "i")
    task = tmp_path / "i" / "mlp.py"
    with task.open("a") as file:
        file.write(SAY_WHAT_IS_VISIBLE)
    words = ("--policies", "mixed_bfloat16", "--batch-sizes", "16,32", "--trials", 2)
    command = tune(task, "--device", "cuda", *words)
    code, _ = command.end()
    cluster.remove(node)
    assert code == 0, command.text
    (made,) = load_folder(tmp_path / "i" / "mlp.profiles").values()
    assert made.device.name == "NVIDIA L4"
    visible = set((tmp_path / "i" / "visible").read_text().split())
    assert len(visible) == 1  # one, by its name on this machine and not by its number
    assert visible.pop().startswith("GPU-")
    assert "no device 'cuda' here" in command.text  # said of the nodes without one


SAY_WHAT_IS_VISIBLE = """

import os
import pathlib

with (pathlib.Path(__file__).with_name("visible")).open("a") as file:
    file.write(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\\n")
"""


UNTIL_LOST = """
import sys, time
from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.core.fleet.node_types import NodeReport
from autoprec.fleet.messages import Request
from autoprec.workers.task_source import TaskSource
from autoprec.fleet.ray_scheduler import RayScheduler
from autoprec.fleet.messages import NodeLost
from autoprec.tuning.options import Options
from pathlib import Path

task, address = Path(sys.argv[1]), sys.argv[2]
kind = Fingerprint(DeviceKind.CPU, "amd-zen4", "", 1)
request = Request(TaskSource(task), "", task.parent, options=Options(), fingerprint=kind)
with RayScheduler(address, wait=True) as cluster:
    import ray
    (node,) = [each["NodeID"] for each in ray.nodes() if each["Resources"].get("CPU") == 3]
    session = cluster.start(NodeReport(node, "node"), request)
    try:
        while True:
            session.receive()
            time.sleep(0.05)
    except NodeLost as lost:
        print(lost, lost.out_of_memory, lost.gone, sep="; ")
"""


def test_what_ray_ends_for_lack_of_memory_is_out_of_memory(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Ray ends workers of a node whose memory is filled beyond a threshold: here, always."""
    task = write_task(tmp_path / "j")
    limits = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    full = cluster.add("amd-zen4", cpus=3, **limits)
    command = Command(cluster.autoprec(task, cluster.address, program=("-c", UNTIL_LOST)))
    code, out = command.end()
    cluster.remove(full)
    assert code == 0, command.text
    assert out == "Ray ended it because the node ran out of memory; True; False\n"


def test_an_address_where_nothing_answers_is_a_usage_error(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "g")
    command = Command(cluster.autoprec("tune", task, "--ray", "127.0.0.1:1", *QUICK))
    code, _ = command.end()
    assert code == 2, command.text
    assert "--ray 127.0.0.1:1 given, but no Ray cluster answers there" in command.text
    assert "Traceback" not in command.text
    command = Command(cluster.autoprec("tune", task, "--ray", RAY_ADDRESS="127.0.0.1:1"))
    assert command.end()[0] == 2, command.text
    assert "--ray 127.0.0.1:1 given, but no Ray cluster answers there" in command.text
