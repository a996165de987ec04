"""Tunes one node of each type of a cluster, all types at once, and keeps what they find.

The driver is the only writer: it appends to each type's journal, prints, and writes the profiles. A
tuning that is lost with its worker or its node begins again where its journal ends, on the same
node or on another of its type.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoprec.core.fleet.node_types import (
    FleetResult,
    NodeReport,
    NodeType,
    TypeResult,
    group_nodes,
)
from autoprec.core.profile import Profile
from autoprec.errors import AutoprecError, NoFeasibleRecipe, TrialFailure, UsageError
from autoprec.fleet.journals import Journals, check_folder, studies_folder
from autoprec.fleet.messages import Journal, Message, ProbeRequest, Request, TaskPlace
from autoprec.fleet.scheduler import NodeLost, NoRoom, Scheduler, Session
from autoprec.profiles import SUFFIX, kept_beside, save_result
from autoprec.tuning.events import Event, Note, TrialFinished
from autoprec.tuning.options import Options
from autoprec.version import __version__
from autoprec.workers.task_digest import source_digest
from autoprec.workers.task_source import TaskSource

#: After so many losses in a row, without a finished trial between them, a type is given up.
MAX_LOSSES = 3

#: So many nodes of a type are asked for room, one after another.
_MAX_NODES_ASKED = 3

_POLL_SECONDS = 0.05

FleetListener = Callable[[str, Event], None]
"""Called with the name of a device type ("" for all of them) and an event of its tuning."""


@dataclass(frozen=True)
class FleetJob:
    """A tuning on a cluster: the task, where profiles go, the options, who listens."""

    task: TaskSource
    output: Path
    options: Options
    listener: FleetListener
    device: str | None = None


def tune_fleet(job: FleetJob, scheduler: Scheduler) -> FleetResult:
    """Probe the nodes, tune one of each type, write the profiles; return how each type ended.

    Raises the error of the first type if no type has a profile.
    """
    job = replace(job, options=portable_options(job.options))
    check_folder(job.output)
    place = TaskPlace(job.task, source_digest(job.task), Path.cwd())
    with Journals(studies_folder(job.output)) as journals:
        probed = scheduler.probe(ProbeRequest(place, job.device))
        reports = [_with_version_checked(each) for each in probed]
        types, unfit = group_nodes(reports), tuple(each for each in reports if each.problem)
        _tell_nodes(job, types, unfit)
        if not types:
            raise UsageError(
                "nothing can be tuned on this cluster: "
                + "; ".join(f"{each.name}: {each.problem}" for each in unfit)
            )
        tunings = [_TypeTuning(job, place, each, scheduler, journals) for each in types]
        try:
            while not all(each.over for each in tunings):
                arrived = [each.advance() for each in tunings]
                if not any(arrived):
                    time.sleep(_POLL_SECONDS)
        finally:
            for each in tunings:
                each.stop()
    results = tuple(each.result for each in tunings)
    if not any(each.profile for each in results):
        raise _first_error(tunings)
    return FleetResult(results, unfit)


def portable_options(options: Options) -> Options:
    """Return the options as a node can use them; raise `UsageError` for a place that is local."""
    name = options.storage
    if name is not None and ("://" not in name or name.startswith(("sqlite:", "journal:"))):
        raise UsageError(
            f"`storage` {name} given, but on a cluster each device type has a journal of its own, "
            "beside the profiles; expected nothing, or the URL of a database server such as "
            "postgresql://user@host/name"
        )
    return replace(options, output=None)


def _with_version_checked(report: NodeReport) -> NodeReport:
    if report.problem or report.autoprec == __version__:
        return report
    return replace(
        report,
        problem=f"autoprec {report.autoprec} is installed there, {__version__} here; install the "
        "same version",
    )


def _tell_nodes(job: FleetJob, types: tuple[NodeType, ...], unfit: tuple[NodeReport, ...]) -> None:
    """Tell which nodes are of which type, and in what nodes of a type disagree."""
    for each in types:
        nodes = ", ".join(node.name for node in each.nodes)
        count = f"{len(each.nodes)} node{'s' if len(each.nodes) != 1 else ''}"
        job.listener(each.name, Note(f"{count} of {each.fingerprint.family}: {nodes}"))
        for said in each.disagreements:
            job.listener(each.name, Note(f"its nodes disagree: {said}", warning=True))
        for node in each.nodes:
            if node.others:
                others = ", ".join(node.others)
                said = f"{node.name} also has {others}: tune for it with `device`"
                job.listener(each.name, Note(said))
    for node in unfit:
        job.listener("", Note(f"{node.name} is left out: {node.problem}", warning=True))


def _first_error(tunings: list[_TypeTuning]) -> AutoprecError:
    """Return the error of a tuning that failed, else one that says that no type had room."""
    for each in tunings:
        if each.error is not None:
            return each.error
    reasons = "; ".join(f"{each.result.type.name}: {each.result.reason}" for each in tunings)
    return NoFeasibleRecipe(f"no device type could be tuned: {reasons}")


class _TypeTuning:
    """The tuning of one type: on which node it runs, and what is done when that is lost."""

    def __init__(
        self,
        job: FleetJob,
        place: TaskPlace,
        kind: NodeType,
        scheduler: Scheduler,
        journals: Journals,
    ) -> None:
        self._job, self._place, self._type = job, place, kind
        self._scheduler, self._journals = scheduler, journals
        self._nodes = list(kind.nodes)
        self._fresh, self._out_of_memory = job.options.fresh, ""
        self._losses, self._full = 0, list[str]()
        self._session: Session | None = None
        self.over = False
        self.error: AutoprecError | None = None
        self.result = TypeResult(kind)

    def stop(self) -> None:
        """End what runs on a node."""
        session, self._session = self._session, None
        if session is not None:
            session.stop()

    def advance(self) -> bool:
        """Start on the next node, or handle what its node has said; return whether it said any."""
        if self.over:
            return False
        try:
            if self._session is None:
                self._session = self._start()
            messages = self._session.receive()
        except NoRoom as full:
            self.stop()
            self._ask_another(str(full))
            return True
        except NodeLost as lost:
            self.stop()
            self._begin_again(lost)
            return True
        for message in messages:
            self._handle(message)
        return bool(messages)

    def _start(self) -> Session:
        """Start on the first node that is left."""
        node, kind, options = self._nodes[0], self._type, self._job.options
        request = Request(
            place=self._place,
            options=replace(options, fresh=self._fresh),
            fingerprint=kind.fingerprint,
            memory_bytes=kind.memory_bytes,
            device=self._job.device,
            journal="" if options.storage else self._journals.read(kind.name),
            out_of_memory=self._out_of_memory,
        )
        self._tell(Note(f"tuning on {node.name}"))
        return self._scheduler.start(node, request)

    def _handle(self, message: Message) -> None:
        self._fresh = False  # what was tried from here on is not to be discarded
        if isinstance(message, Profile):
            self.stop()
            self._save(message)
        elif isinstance(message, AutoprecError):
            self.stop()
            self._fail(message)
        elif isinstance(message, Journal):
            self._journals.write(self._type.name, message.text)
        elif not isinstance(message, NodeReport):
            if isinstance(message, TrialFinished):
                self._losses = 0
            self._tell(message)

    def _save(self, profile: Profile) -> None:
        path = self._job.output / f"{self._type.name}{SUFFIX}"
        place = save_result(profile, path)
        self._end(profile=profile, file=place.name)
        if place != path:
            self._tell(Note(kept_beside(path, place), warning=True))

    def _ask_another(self, reason: str) -> None:
        """Go on to the next node of the type, if there is one."""
        node = self._nodes.pop(0)
        self._full.append(f"{node.name} has no room: {reason}")
        if not self._nodes or len(self._full) == _MAX_NODES_ASKED:
            self._end(reason="; ".join(self._full))
            self._tell(Note(self.result.reason, warning=True))

    def _begin_again(self, lost: NodeLost) -> None:
        """Go on where the journal ends: on the same node while that is there, else on another."""
        self._losses += 1
        node = self._nodes[0]
        if lost.gone:
            self._nodes.pop(0)
        if not self._nodes or self._losses >= MAX_LOSSES:
            why = "no other node is of this type" if not self._nodes else "this keeps happening"
            said = f"the tuning on {node.name} was lost ({lost}); {why}. Finished trials are kept"
            self._fail(TrialFailure(f"{said}: run the same command again"))
            return
        self._tell(Note(f"lost on {node.name}: {lost}; finished trials are kept", warning=True))
        self._out_of_memory = str(lost) if lost.out_of_memory else ""

    def _fail(self, error: AutoprecError) -> None:
        self.error = error
        self._end(reason=str(error), failed=True)
        self._tell(Note(f"failed: {error}", warning=True))

    def _end(self, **how: Any) -> None:
        self.over, self.result = True, replace(self.result, **how)

    def _tell(self, event: Event) -> None:
        self._job.listener(self._type.name, event)
