"""What runs on a node of a cluster: its probe, and the tuning of its type.

No scheduler is known here. The tuning is the one of a single machine, its worker processes
included; only its journal is a copy, and its events are sent to the driver.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autoprec import probing
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.fleet.node_types import NodeReport, is_of_type
from autoprec.core.probe_result import ProbeResult
from autoprec.core.profile import Profile
from autoprec.errors import AutoprecError, TrialFailure
from autoprec.fleet.journals import JournalTail
from autoprec.fleet.messages import Ended, Message, Request, TaskPlace, Update, request_from_line
from autoprec.tuning import tuner
from autoprec.tuning.events import Event, Progress
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.ranks import peers_of
from autoprec.tuning.study.study import record_out_of_memory
from autoprec.version import __version__
from autoprec.workers.task_digest import task_digest

#: Progress is for people: more of it than this is not sent.
_PROGRESS_SECONDS = 1.0

Send = Callable[[Message], None]


def probe_node(place: TaskPlace, device: str | None) -> NodeReport:
    """Probe the machine this runs on; the scheduler adds what it calls the node."""
    report = NodeReport(node="", name=socket.gethostname(), autoprec=__version__)
    try:
        machine = probing.probe_here(device=device)
    except AutoprecError as error:
        return replace(report, problem=str(error))
    facts = [each.facts for each in machine.devices]
    others = {each.name for each in facts[1:] if each.kind == facts[0].kind} - {facts[0].name}
    return replace(
        report,
        facts=facts[0],
        software=_software(machine),
        others=tuple(sorted(others)),
        problem=_task_problem(place),
    )


def _software(machine: ProbeResult) -> dict[str, str]:
    return {each.name: each.version for each in machine.frameworks} | {"python": machine.python}


def _task_problem(place: TaskPlace) -> str:
    """Say why the task cannot be run on this machine as it is where the command was given."""
    if not place.task.is_file():
        return (
            f"the task file {place.task} is not there; put it on a file system that the nodes "
            "share, or send its folder with the job (Ray: ray job submit --working-dir)"
        )
    if task_digest(place.task) != place.digest:
        return f"{place.task} there, or a module it imports, is another version; update it"
    return ""


def tune_here(request: bytes, send: Send) -> None:
    """Tune on this machine; send every event, the journal's growth, and how it ended.

    The request is a line that `request_to_line` wrote.
    """
    try:
        profile = _tune(request_from_line(request), send)
    except AutoprecError as error:
        send(Ended(error=error))
    except Exception as error:
        shown = "".join(traceback.format_exception(error))
        failure = TrialFailure(f"autoprec failed on the node: {type(error).__name__}: {error}")
        failure.add_note(shown)
        send(Ended(error=failure))
    else:
        send(Ended(profile=profile))


def _tune(request: Request, send: Send) -> Profile:
    with contextlib.suppress(OSError):  # relative paths in a task start where the command was given
        os.chdir(request.place.folder)
    machine = probing.probe_here(device=request.device)
    found = machine.devices[0].facts
    facts = _facts_of_type(found, request)
    with tempfile.TemporaryDirectory(prefix="autoprec-study-") as folder:
        journal = JournalTail(Path(folder) / "study.journal", request.journal)
        listen = _Listener(journal, send)
        if request.out_of_memory:
            record_out_of_memory(journal.path, request.out_of_memory)
        storage = request.options.storage or str(journal.path)
        target = Target(
            facts=facts,
            software=_software(machine),
            measure=lambda known: probing.measure_device(known, _frameworks(machine)),
            unusable=() if request.device else machine.unusable,
            peers=peers_of(found, [each.facts for each in machine.devices]),
        )
        options = replace(request.options, storage=storage)
        try:
            return tuner.tune(TuningJob(request.place.task, target, options, listen))
        finally:
            listen.send_journal()


def _frameworks(machine: ProbeResult) -> dict[str, str]:
    return {each.name: each.version for each in machine.frameworks}


def _facts_of_type(facts: DeviceFacts, request: Request) -> DeviceFacts:
    """Return this machine's device as one of its type: with the least memory of the type."""
    if not is_of_type(facts, request.fingerprint):
        raise TrialFailure(
            f"the device here is {facts.name}, the type to be tuned is "
            f"{request.fingerprint.name or request.fingerprint.family}: the node has changed since "
            "it was probed. Run the same command again"
        )
    if request.memory_bytes is None:
        return facts
    return replace(facts, observation=replace(facts.observation, memory_bytes=request.memory_bytes))


class _Listener:
    """Sends a tuning's events with what its journal grew by."""

    def __init__(self, journal: JournalTail, send: Send) -> None:
        self._journal, self._send = journal, send
        self._shown = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress):
            now = time.monotonic()
            if now - self._shown < _PROGRESS_SECONDS:
                return
            self._shown = now
            self._send(Update(event))
            return
        offset, lines = self._journal.added()
        self._send(Update(event, lines, offset))

    def send_journal(self) -> None:
        """Send what was written after the last event."""
        offset, lines = self._journal.added()
        if lines:
            self._send(Update(None, lines, offset))
