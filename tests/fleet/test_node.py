"""What runs on a node: its probe, and a tuning whose journal and events are sent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec import probing
from autoprec.core.dtypes import Policy
from autoprec.core.fleet.node_types import NodeReport
from autoprec.core.profile import Profile
from autoprec.errors import AutoprecError, TaskError, TrialFailure, UsageError
from autoprec.fleet import node, ray_scheduler
from autoprec.fleet.messages import (
    Journal,
    Message,
    Request,
    from_line,
)
from autoprec.tuning.events import Described, Started, TrialFinished
from autoprec.tuning.options import Options
from autoprec.workers.task_digest import task_digest
from autoprec.workers.task_source import TaskSource

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
    pytest.mark.usefixtures("unmeasured", "in_process"),
]

FAST = {
    "overhead": {"float32": 0.004, "mixed_bfloat16": 0.006},
    "per_sample": {"float32": 0.0005, "mixed_bfloat16": 0.0002},
}
#: Policies by name: whatever the processor here is good at, both are tried.
OPTIONS = Options(
    policies=(Policy.FLOAT32, Policy.MIXED_BFLOAT16), batch_sizes=(16, 32), rounds=2, extras=False
)


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def place(simulated: Callable[..., Path], tmp_path: Path) -> Request:
    """The request for a probe of a node with the task."""
    task = simulated(**FAST)
    return Request(TaskSource(task), task_digest(task), tmp_path, "cpu")


def request_for(place: Request, **fields: Any) -> Request:
    """The request for a tuning of the same task."""
    facts = probing.probe_here(device="cpu").devices[0].facts
    known = {"fingerprint": facts.fingerprint, "memory_bytes": facts.observation.memory_bytes}
    return replace(place, **{"options": OPTIONS, **known, **fields})


def tune(request: Request) -> tuple[list[Message], Message]:
    sent: list[Message] = []
    node.answer(request.to_line(), sent.append)
    return sent, sent[-1]


def tuned(request: Request) -> Profile:
    _, ended = tune(request)
    assert isinstance(ended, Profile)
    return ended


def of_kind(sent: list[Message], kind: type) -> list[Any]:
    return [message for message in sent if isinstance(message, kind)]


def probe(place: Request, device: str) -> NodeReport:
    return node.probe_node(replace(place, device=device))


def test_a_probe_tells_device_software_and_version(place: Request) -> None:
    report = probe(place, "cpu")
    assert report.problem == ""
    assert report.facts is not None
    assert report.facts.kind == "cpu"
    assert {"python", "torch"} <= report.software.keys()


def test_a_node_without_the_task_or_with_another_one_has_a_problem(place: Request) -> None:
    gone = replace(place, task=TaskSource(Path("/nowhere/model.py")))
    assert "/nowhere/model.py is not there" in probe(gone, "cpu").problem
    other = replace(place, digest="0" * 64)
    assert "is another version" in probe(other, "cpu").problem


def test_a_node_without_the_device_asked_for_has_a_problem(place: Request) -> None:
    assert "no device 'tpu' here" in probe(place, "tpu").problem


def test_a_tuning_sends_its_trials_after_the_journal_that_they_are_in(place: Request) -> None:
    sent, ended = tune(request_for(place))
    assert isinstance(ended, Profile)
    assert ended.recipe.policy == "mixed_bfloat16"
    trials, journal = of_kind(sent, TrialFinished), ""
    assert trials
    for message in sent:
        if isinstance(message, Journal):
            assert message.text.startswith(journal)
            journal = message.text
        if isinstance(message, TrialFinished):
            assert journal.count('"outcome"') >= trials.index(message) + 1
    again, ended = tune(request_for(place, journal=journal))
    assert of_kind(again, TrialFinished) == []
    assert ended == tuned(request_for(place, journal=journal))


def test_a_tuning_that_was_cut_short_goes_on_where_the_journal_ends(place: Request) -> None:
    sent, _ = tune(request_for(place))
    first = next(message for message in sent if isinstance(message, TrialFinished))
    known = of_kind(sent[: sent.index(first)], Journal)[-1].text
    again, ended = tune(request_for(place, journal=known))
    (described,) = of_kind(again, Described)
    assert described.resumed == 1
    assert isinstance(ended, Profile)
    assert first.recipe not in [each.recipe for each in of_kind(again, TrialFinished)]


def test_the_least_memory_of_the_type_is_tuned_for(place: Request) -> None:
    sent, ended = tune(request_for(place, memory_bytes=2**30))
    (started,) = of_kind(sent, Started)
    assert started.facts.observation.memory_bytes == 2**30
    assert isinstance(ended, Profile)
    assert ended.device.fingerprint.memory_gib == 1


def test_a_request_reads_back_as_it_was_whatever_its_options_are(
    place: Request, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.pt"
    weights.touch()
    options = Options(
        policies="fp16",
        batch_sizes=[8, 24],
        time_limit=3,
        knobs={"threads": (2, 1), "compile_mode": ("default",), "cudnn_benchmark": (True,)},
        checkpoint=weights,
        nproc=2,
        engine="fsdp2",
    )
    request = request_for(place, options=options, journal="\u2713\n{}\n", out_of_memory="full")
    line = request.to_line()
    assert Request.from_line(line) == request
    weights.unlink()
    with pytest.raises(UsageError, match=r"cannot do what is asked: .*weights\.pt does not exist"):
        Request.from_line(line)
    sent: list[Message] = []
    node.answer(line, sent.append)
    assert isinstance(sent[-1], UsageError)


def test_a_device_of_another_type_is_not_tuned(place: Request) -> None:
    request = request_for(place)
    assert request.fingerprint is not None
    other = replace(request, fingerprint=replace(request.fingerprint, family="amd-zen1"))
    _, ended = tune(other)
    assert isinstance(ended, TrialFailure)
    assert "the node has changed since it was probed" in str(ended)


def test_the_users_error_arrives_as_it_is(place: Request) -> None:
    place.task.path.write_text("def build_model(): return 1\n")
    _, ended = tune(request_for(place))
    assert isinstance(ended, TaskError)


def test_an_error_of_our_own_is_told_not_swallowed(
    place: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.tuner, "tune", lambda job: 1 // 0)
    _, ended = tune(request_for(place))
    assert isinstance(ended, TrialFailure)
    assert "ZeroDivisionError" in str(ended)
    assert any("test_node" in note for note in ended.__notes__)


def test_threads_set_by_ray_are_taken_back_and_those_of_the_node_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(ray_scheduler, "_set_on_node", lambda: True)
    ray_scheduler.forget_ray_threads()
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr(ray_scheduler, "_set_on_node", lambda: False)
    ray_scheduler.forget_ray_threads()
    assert "OMP_NUM_THREADS" not in os.environ


def test_an_actor_hands_over_messages_in_order_and_answers_without_one(place: Request) -> None:
    actor = ray_scheduler.TuningActor(request_for(place).to_line())
    assert actor.messages(0.01) == ()
    assert actor.start() == ()
    found: list[Message] = []
    while not (found and isinstance(found[-1], Profile | AutoprecError)):
        found += actor.messages(60)
    assert isinstance(found[-1], Profile)


def program(request: Request, folder: Path) -> subprocess.Popen[bytes]:
    file = folder / "request"
    file.write_bytes(request.to_line())
    return subprocess.Popen(
        [sys.executable, "-m", "autoprec.fleet.node", str(file)],
        env={**os.environ, "SLURMD_NODENAME": "n7"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def test_the_program_answers_a_probe_in_one_line(place: Request, tmp_path: Path) -> None:
    with program(place, tmp_path) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        report = from_line(running.stdout.readline())
        running.stdin.close()
        assert running.wait(30) == 0
    assert isinstance(report, NodeReport)
    assert (report.node, report.problem) == ("n7", "")


def test_the_program_ends_when_its_driver_has_ended(place: Request, tmp_path: Path) -> None:
    place.task.path.write_text(f"import time\ntime.sleep(600)\n{place.task.path.read_text()}")
    with program(request_for(place), tmp_path) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert from_line(running.stdout.readline())
        running.stdin.close()
        assert running.wait(30) != 0
