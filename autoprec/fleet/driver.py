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
from autoprec.fleet.messages import Ended, Request, TaskPlace, Update
from autoprec.fleet.scheduler import NodeLost, NoRoom, Scheduler, Session
from autoprec.profiles import SUFFIX, kept_beside, save_result
from autoprec.tuning.events import Event, Note, TrialFinished
from autoprec.tuning.options import Options
from autoprec.version import __version__
from autoprec.workers.task_digest import task_digest

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

    task: Path
    output: Path
    options: Options
    listener: FleetListener
    device: str | None = None

    def place(self) -> TaskPlace:
        """Return where the task is to be found on the nodes."""
        return TaskPlace(self.task, task_digest(self.task), Path.cwd())


def tune_fleet(job: FleetJob, scheduler: Scheduler) -> FleetResult:
    """Probe the nodes, tune one of each type, write the profiles; return how each type ended.

    Raises the error of the first type where no type has a profile.
    """
    job = replace(job, options=portable_options(job.options))
    check_folder(job.output)
    place = job.place()
    with Journals(studies_folder(job.output)) as journals:
        reports = [_with_version_checked(each) for each in scheduler.probe(place, job.device)]
        types, unfit = group_nodes(reports), tuple(each for each in reports if each.problem)
        _tell_nodes(job, types, unfit)
        if not types:
            raise UsageError(
                "nothing can be tuned on this cluster: "
                + "; ".join(f"{each.name}: {each.problem}" for each in unfit)
            )
        tunings = [_TypeTuning(job, place, each, scheduler, journals) for each in types]
        try:
            for each in tunings:
                each.begin()
            while any(each.running for each in tunings):
                arrived = [each.advance() for each in tunings]
                if not any(arrived):
                    time.sleep(_POLL_SECONDS)
        finally:
            for each in tunings:
                each.stop()
    results = tuple(each.result() for each in tunings)
    if not any(each.profile for each in results):
        raise _first_error(tunings, results)
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
    """Tell which nodes are of which type, and where nodes of a type disagree."""
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


def _first_error(tunings: list[_TypeTuning], results: tuple[TypeResult, ...]) -> AutoprecError:
    """Return the error of a tuning that failed, else what says that no type had room."""
    for each in tunings:
        if each.error is not None:
            return each.error
    reasons = "; ".join(f"{each.type.name}: {each.reason}" for each in results)
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
        self._fresh = job.options.fresh
        self._losses = 0
        self._asked: list[str] = []
        self._session: Session | None = None
        self._profile: Profile | None = None
        self._file, self._reason = "", ""
        self.error: AutoprecError | None = None

    @property
    def running(self) -> bool:
        """Say whether a node is tuning, or is waited for."""
        return self._session is not None

    def result(self) -> TypeResult:
        """Return how it ended."""
        return TypeResult(
            self._type, self._profile, self._file, self._reason, self.error is not None
        )

    def stop(self) -> None:
        """End what runs on a node."""
        session, self._session = self._session, None
        if session is not None:
            session.stop()

    def advance(self) -> bool:
        """Handle what has arrived; say whether anything had."""
        if self._session is None:
            return False
        try:
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
            if isinstance(message, Ended):
                self._end(message)
            else:
                self._update(message)
        return bool(messages)

    def begin(self, out_of_memory: str = "") -> None:
        """Start on the first node that is left."""
        node, kind = self._nodes[0], self._type
        request = Request(
            place=self._place,
            options=replace(self._job.options, fresh=self._fresh),
            fingerprint=kind.fingerprint,
            memory_bytes=kind.memory_bytes,
            device=self._job.device,
            journal=b"" if self._job.options.storage else self._journals.read(kind.name),
            out_of_memory=out_of_memory,
        )
        self._tell(Note(f"tuning on {node.name}"))
        self._session = self._scheduler.start(node, request)

    def _update(self, update: Update) -> None:
        self._journals.append(self._type.name, update.offset, update.journal)
        self._fresh = False  # what was tried from now on is not to be discarded
        if isinstance(update.event, TrialFinished):
            self._losses = 0
        if update.event is not None:
            self._tell(update.event)

    def _end(self, ended: Ended) -> None:
        self.stop()
        self._profile = ended.profile
        if ended.profile is None:
            self._fail(ended.error or TrialFailure("the node sent no profile"))
            return
        path = self._job.output / f"{self._type.name}{SUFFIX}"
        place = save_result(ended.profile, path)
        self._file = place.name
        if place != path:
            self._tell(Note(kept_beside(path, place), warning=True))

    def _ask_another(self, reason: str) -> None:
        """Ask the next node of the type for room, if there is one."""
        node = self._nodes.pop(0)
        self._asked.append(f"{node.name} has no room: {reason}")
        if self._nodes and len(self._asked) < _MAX_NODES_ASKED:
            self.begin()
        else:
            self._reason = "; ".join(self._asked)
            self._tell(Note(self._reason, warning=True))

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
        self.begin(str(lost) if lost.out_of_memory else "")

    def _fail(self, error: AutoprecError) -> None:
        self.error, self._reason = error, str(error)
        self._tell(Note(f"failed: {error}", warning=True))

    def _tell(self, event: Event) -> None:
        self._job.listener(self._type.name, event)
