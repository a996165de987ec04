"""The driver: what it makes of what nodes send, and of nodes that are lost or have no room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from factories import device_of_family, profile_of, ran_at

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.fleet.node_types import FleetResult, NodeReport
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecError, NoFeasibleRecipe, TaskError, TrialFailure, UsageError
from autoprec.fleet.driver import MAX_LOSSES, FleetJob, portable_options, tune_fleet
from autoprec.fleet.journals import studies_folder
from autoprec.fleet.messages import Journal, Message, NodeLost, NoRoom, Request
from autoprec.profiles import load_folder
from autoprec.tuning.events import Event, Note, TrialFinished
from autoprec.tuning.options import Options
from autoprec.version import __version__
from autoprec.workers.task_source import TaskSource

ZEN4, A100 = device_of_family("amd-zen4"), device_of_family("nvidia-a100")
LINE = '{"op_code": 0, "worker_id": "w", "study_name": "s", "directions": [2]}\n'
Script = Sequence[Message | BaseException]


def profile(facts: DeviceFacts) -> Profile:
    return profile_of(Recipe(), "simulated", facts.fingerprint)


def trial(number: int = 0) -> TrialFinished:
    point = {"policy": "float32", "batch_size": 8, "memory_format": "contiguous", "compile": False}
    return TrialFinished(number, Recipe(), ran_at(point, 100.0), 100.0, 100.0)


class ScriptedSession:
    def __init__(self, script: Script, stopped: Callable[[], None]) -> None:
        self._script, self.stop = list(script), stopped

    def receive(self) -> Sequence[Message]:
        assert self._script, "the driver asks on after the end"
        said = self._script.pop(0)
        if isinstance(said, BaseException) and not isinstance(said, AutoprecError):
            raise said
        return [said]


class ScriptedScheduler:
    """Nodes whose tunings say what is written: one script for each time that one is started."""

    def __init__(self, reports: Sequence[NodeReport], scripts: dict[str, list[Script]]) -> None:
        self.reports, self.scripts = reports, scripts
        self.requests: list[tuple[str, Request]] = []
        self.stopped: list[str] = []

    def probe(self, request: Request) -> Sequence[NodeReport]:
        return self.reports

    def start(self, node: NodeReport, request: Request) -> ScriptedSession:
        self.requests.append((node.name, request))
        script = self.scripts[node.name].pop(0)
        return ScriptedSession(script, lambda: self.stopped.append(node.name))


def node(name: str, facts: DeviceFacts, **fields: object) -> NodeReport:
    made = NodeReport(name, name, facts, {"torch": "2.13.0"}, __version__)
    return replace(made, **fields)  # type: ignore[arg-type]


class Fleet:
    """One run of the driver, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, list[tuple[str, Event]]()
        self.task = folder / "model.py"
        self.task.write_text("def build_model(): ...\n")
        self.output = folder / "model.profiles"

    def tune(self, scheduler: ScriptedScheduler, options: Options | None = None) -> FleetResult:
        job = FleetJob(
            TaskSource(self.task),
            self.output,
            options or Options(),
            lambda name, event: self.told.append((name, event)),
        )
        return tune_fleet(job, scheduler)

    @property
    def notes(self) -> str:
        return "\n".join(event.text for _, event in self.told if isinstance(event, Note))

    def journal(self, name: str) -> str:
        return (studies_folder(self.output) / f"{name}.study.journal").read_text()


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_one_node_of_each_type_is_tuned_and_its_profile_written(fleet: Fleet) -> None:
    scheduler = ScriptedScheduler(
        [node("a", ZEN4), node("b", ZEN4), node("g", A100)],
        {"a": [[profile(ZEN4)]], "g": [[profile(A100)]]},
    )
    result = fleet.tune(scheduler)
    assert sorted(name for name, _ in scheduler.requests) == ["a", "g"]
    assert [each.failed for each in result.types] == [False, False]
    written = load_folder(fleet.output)
    assert set(written) == {each.file for each in result.types}
    assert {each.device.family for each in written.values()} == {"amd-zen4", "nvidia-a100"}
    assert sorted(scheduler.stopped) == ["a", "g"]


def test_events_are_told_with_their_type_and_the_journal_is_kept_before(fleet: Fleet) -> None:
    kept: list[str] = []

    def listen(name: str, event: Event) -> None:
        if isinstance(event, TrialFinished):
            kept.append(fleet.journal(name))

    scheduler = ScriptedScheduler(
        [node("a", ZEN4)],
        {"a": [[Journal(LINE), trial(), Journal(LINE * 2), profile(ZEN4)]]},
    )
    job = FleetJob(TaskSource(fleet.task), fleet.output, Options(), listen)
    (found,) = tune_fleet(job, scheduler).types
    assert kept == [LINE]
    assert fleet.journal(found.type.name) == LINE * 2


def test_a_type_without_room_is_named_and_the_others_go_on(fleet: Fleet) -> None:
    scheduler = ScriptedScheduler(
        [node("a", ZEN4), node("g", A100)],
        {"a": [[profile(ZEN4)]], "g": [[NoRoom("its GPUs are taken")]]},
    )
    result = fleet.tune(scheduler)
    reasons = {each.type.fingerprint.family: each for each in result.types}
    full = reasons["nvidia-a100"]
    assert (full.profile, full.failed) == (None, False)
    assert full.reason == "g has no room: its GPUs are taken"
    assert reasons["amd-zen4"].profile is not None


def test_another_node_of_the_type_is_asked_for_room(fleet: Fleet) -> None:
    scheduler = ScriptedScheduler(
        [node("a", ZEN4), node("b", ZEN4)], {"a": [[NoRoom("full")]], "b": [[profile(ZEN4)]]}
    )
    (found,) = fleet.tune(scheduler).types
    assert found.profile is not None
    assert [name for name, _ in scheduler.requests] == ["a", "b"]


def test_where_no_type_has_room_nothing_is_feasible(fleet: Fleet) -> None:
    scheduler = ScriptedScheduler([node("a", ZEN4)], {"a": [[NoRoom("full")]]})
    with pytest.raises(NoFeasibleRecipe, match="a has no room: full"):
        fleet.tune(scheduler)


def test_what_was_lost_begins_again_on_its_node_with_the_journal(fleet: Fleet) -> None:
    lost: Script = [Journal(LINE), trial(), NodeLost("its worker was killed")]
    scheduler = ScriptedScheduler([node("a", ZEN4)], {"a": [lost, [profile(ZEN4)]]})
    fleet.tune(scheduler, Options(fresh=True))
    (_, first), (_, second) = scheduler.requests
    assert first.options is not None
    assert second.options is not None
    assert (first.journal, first.options.fresh) == ("", True)
    assert (second.journal, second.options.fresh, second.out_of_memory) == (LINE, False, "")
    assert "lost on a: its worker was killed; finished trials are kept" in fleet.notes


def test_what_was_lost_for_lack_of_memory_is_told_to_the_next(fleet: Fleet) -> None:
    lost: Script = [NodeLost("Ray ended it", out_of_memory=True)]
    scheduler = ScriptedScheduler([node("a", ZEN4)], {"a": [lost, [profile(ZEN4)]]})
    fleet.tune(scheduler)
    assert scheduler.requests[1][1].out_of_memory == "Ray ended it"


def test_a_lost_node_is_replaced_by_another_of_its_type(fleet: Fleet) -> None:
    scheduler = ScriptedScheduler(
        [node("a", ZEN4), node("b", ZEN4)],
        {"a": [[NodeLost("it left", gone=True)]], "b": [[profile(ZEN4)]]},
    )
    (found,) = fleet.tune(scheduler).types
    assert found.profile is not None
    assert [name for name, _ in scheduler.requests] == ["a", "b"]


def test_a_type_that_is_lost_again_and_again_is_given_up(fleet: Fleet) -> None:
    lost: Script = [NodeLost("killed")]
    scheduler = ScriptedScheduler(
        [node("a", ZEN4), node("g", A100)],
        {"a": [lost] * MAX_LOSSES, "g": [[profile(A100)]]},
    )
    result = fleet.tune(scheduler)
    given_up = next(each for each in result.types if each.failed)
    assert "this keeps happening" in given_up.reason
    assert len([name for name, _ in scheduler.requests if name == "a"]) == MAX_LOSSES


def test_losses_with_a_finished_trial_between_them_do_not_add_up(fleet: Fleet) -> None:
    lost: Script = [trial(), NodeLost("killed")]
    scripts: list[Script] = [*[lost] * (2 * MAX_LOSSES), [profile(ZEN4)]]
    (found,) = fleet.tune(ScriptedScheduler([node("a", ZEN4)], {"a": scripts})).types
    assert found.profile is not None


def test_an_error_of_one_type_leaves_the_others_their_profiles(fleet: Fleet) -> None:
    scheduler = ScriptedScheduler(
        [node("a", ZEN4), node("g", A100)],
        {"a": [[profile(ZEN4)]], "g": [[TrialFailure("it broke")]]},
    )
    result = fleet.tune(scheduler)
    assert [(each.reason, each.failed) for each in result.types if not each.profile] == [
        ("it broke", True)
    ]
    assert len(load_folder(fleet.output)) == 1


def test_an_error_of_all_types_is_raised_as_it_is(fleet: Fleet) -> None:
    error = TaskError("build_model is missing")
    scheduler = ScriptedScheduler([node("a", ZEN4)], {"a": [[error]]})
    with pytest.raises(TaskError, match="build_model is missing"):
        fleet.tune(scheduler)


def test_an_interrupt_stops_what_runs_everywhere(fleet: Fleet) -> None:
    scheduler = ScriptedScheduler(
        [node("a", ZEN4), node("g", A100)],
        {"a": [[Note("on"), KeyboardInterrupt()]], "g": [[Note("on")] * 100]},
    )
    with pytest.raises(KeyboardInterrupt):
        fleet.tune(scheduler)
    assert sorted(scheduler.stopped) == ["a", "g"]


def test_nodes_that_cannot_be_tuned_on_are_left_out_with_their_reason(fleet: Fleet) -> None:
    other = node("b", ZEN4, autoprec="0.0.1")
    broken = NodeReport("c", "c", problem="its probe did not answer")
    scheduler = ScriptedScheduler([node("a", ZEN4), other, broken], {"a": [[profile(ZEN4)]]})
    result = fleet.tune(scheduler)
    assert {each.name: each.problem for each in result.unfit} == {
        "b": f"autoprec 0.0.1 is installed there, {__version__} here; install the same version",
        "c": "its probe did not answer",
    }
    assert "b is left out: autoprec 0.0.1" in fleet.notes
    with pytest.raises(UsageError, match="nothing can be tuned on this cluster: c: its probe"):
        fleet.tune(ScriptedScheduler([broken], {}))


def test_nodes_that_disagree_and_devices_beside_the_tuned_one_are_told(fleet: Fleet) -> None:
    scheduler = ScriptedScheduler(
        [node("a", ZEN4, others=("NVIDIA T4",)), node("b", ZEN4, software={"torch": "2.12.0"})],
        {"a": [[profile(ZEN4)]]},
    )
    fleet.tune(scheduler)
    assert "its nodes disagree: torch: 2.13.0 on a; 2.12.0 on b" in fleet.notes
    assert "a also has NVIDIA T4: tune for it with `device`" in fleet.notes


@pytest.mark.parametrize("storage", ["here.journal", "sqlite:///s.db", "journal://here"])
def test_a_storage_on_one_machine_is_refused(storage: str) -> None:
    with pytest.raises(UsageError, match=r"the URL of a database server such as postgresql"):
        portable_options(Options(storage=storage))


def test_a_database_server_is_used_by_the_nodes_and_no_journal_is_sent(fleet: Fleet) -> None:
    url = "postgresql://me@host/studies"
    scheduler = ScriptedScheduler([node("a", ZEN4)], {"a": [[profile(ZEN4)]]})
    fleet.tune(scheduler, Options(storage=url))
    ((_, request),) = scheduler.requests
    assert request.options is not None
    assert (request.options.storage, request.journal) == (url, "")
