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
from autoprec.fleet.messages import Journal, Message, NodeLost, NoRoom, Request, Scheduler, Session
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
    options = portable_options(job.options)
    check_folder(job.output)
    asked = Request(job.task, source_digest(job.task), Path.cwd(), job.device)
    with Journals(studies_folder(job.output)) as journals:
        reports = [_with_version_checked(each) for each in scheduler.probe(asked)]
        types, unfit = group_nodes(reports), tuple(each for each in reports if each.problem)
        _tell_nodes(job.listener, types, unfit)
        if not types:
            reasons = "; ".join(f"{each.name}: {each.problem}" for each in unfit)
            raise UsageError(f"nothing can be tuned on this cluster: {reasons}")
        tunings = [_TypeTuning(job, asked, options, each, scheduler, journals) for each in types]
        try:
            while not all(each.over for each in tunings):
                if not any([each.advance() for each in tunings]):  # noqa: C419  all of them advance
                    time.sleep(_POLL_SECONDS)
        finally:
            for each in tunings:
                each.stop()
    results = tuple(each.result for each in tunings)
    if any(each.profile for each in results):
        return FleetResult(results, unfit)
    for each in tunings:
        if each.error is not None:
            raise each.error
    full = "; ".join(f"{each.type.name}: {each.reason}" for each in results)
    raise NoFeasibleRecipe(f"no device type could be tuned: {full}")


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


def _tell_nodes(
    tell: FleetListener, types: tuple[NodeType, ...], unfit: tuple[NodeReport, ...]
) -> None:
    """Tell which nodes are of which type, and in what nodes of a type disagree."""
    for kind in types:
        names = ", ".join(node.name for node in kind.nodes)
        count = f"{len(kind.nodes)} node{'s' if len(kind.nodes) != 1 else ''}"
        tell(kind.name, Note(f"{count} of {kind.fingerprint.family}: {names}"))
        for difference in kind.disagreements:
            tell(kind.name, Note(f"its nodes disagree: {difference}", warning=True))
        for node in kind.nodes:
            if node.others:
                others = f"{node.name} also has {', '.join(node.others)}: tune for it with `device`"
                tell(kind.name, Note(others))
    for node in unfit:
        tell("", Note(f"{node.name} is left out: {node.problem}", warning=True))


class _TypeTuning:
    """The tuning of one type: on which node it runs, and what is done when that is lost."""

    def __init__(
        self,
        job: FleetJob,
        asked: Request,
        options: Options,
        kind: NodeType,
        scheduler: Scheduler,
        journals: Journals,
    ) -> None:
        self._job, self._type, self._options = job, kind, options
        self._asked = replace(asked, fingerprint=kind.fingerprint, memory_bytes=kind.memory_bytes)
        self._scheduler, self._journals = scheduler, journals
        self._nodes = list(kind.nodes)
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
        journal = "" if self._options.storage else self._journals.read(self._type.name)
        asked = replace(self._asked, options=self._options, journal=journal)
        self._tell(f"tuning on {self._nodes[0].name}")
        return self._scheduler.start(self._nodes[0], asked)

    def _handle(self, message: Message) -> None:
        if self._options.fresh:  # what was tried from here on is not to be discarded
            self._options = replace(self._options, fresh=False)
        if isinstance(message, Profile):
            self.stop()
            path = self._job.output / f"{self._type.name}{SUFFIX}"
            place = save_result(message, path)
            self._end(profile=message, file=place.name)
            if place != path:
                self._tell(kept_beside(path, place), warning=True)
        elif isinstance(message, AutoprecError):
            self.stop()
            self._fail(message)
        elif isinstance(message, Journal):
            self._journals.write(self._type.name, message.text)
        elif not isinstance(message, NodeReport):
            if isinstance(message, TrialFinished):
                self._losses = 0
            self._job.listener(self._type.name, message)

    def _ask_another(self, reason: str) -> None:
        """Go on to the next node of the type, if there is one."""
        self._full.append(f"{self._nodes.pop(0).name} has no room: {reason}")
        if not self._nodes or len(self._full) == _MAX_NODES_ASKED:
            self._end(reason="; ".join(self._full))
            self._tell(self.result.reason, warning=True)

    def _begin_again(self, lost: NodeLost) -> None:
        """Go on where the journal ends: on the same node while that is there, else on another."""
        self._losses += 1
        node = self._nodes.pop(0) if lost.gone else self._nodes[0]
        if self._nodes and self._losses < MAX_LOSSES:
            reason = str(lost) if lost.out_of_memory else ""
            self._asked = replace(self._asked, out_of_memory=reason)
            self._tell(f"lost on {node.name}: {lost}; finished trials are kept", warning=True)
            return
        why = "this keeps happening" if self._nodes else "no other node is of this type"
        self._fail(
            TrialFailure(
                f"the tuning on {node.name} was lost ({lost}); {why}. Finished trials are kept: "
                "run the same command again"
            )
        )

    def _fail(self, error: AutoprecError) -> None:
        self.error = error
        self._end(reason=str(error), failed=True)
        self._tell(f"failed: {error}", warning=True)

    def _end(self, **how: Any) -> None:
        self.over, self.result = True, replace(self.result, **how)

    def _tell(self, text: str, warning: bool = False) -> None:
        self._job.listener(self._type.name, Note(text, warning=warning))
