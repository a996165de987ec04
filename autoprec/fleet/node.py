"""What runs on a node of a cluster: its probe, and the tuning of its type.

No scheduler is known here. The tuning is the one of a single machine, its worker processes
included; only its journal is a copy, and its events are sent to the driver.

As a program (`python -m autoprec.fleet.node tune FILE`, or probe) it answers the request in a file
by messages on stdout, and ends when its stdin does: its driver is gone then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autoprec import probing
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.fleet.node_types import NodeReport, is_same_type
from autoprec.core.profile import Profile
from autoprec.errors import AutoprecError, TrialFailure
from autoprec.fleet.journals import read_journal
from autoprec.fleet.messages import (
    Journal,
    Message,
    ProbeRequest,
    Request,
    TaskPlace,
    probe_from_line,
    request_from_line,
    to_line,
)
from autoprec.tuning import tuner
from autoprec.tuning.events import Event, Progress
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.ranks import peers_of
from autoprec.tuning.study.study import record_out_of_memory
from autoprec.version import __version__
from autoprec.workers.task_digest import source_digest

#: Progress is for people: more of it than this is not sent.
_PROGRESS_SECONDS = 1.0

#: A tuning whose driver has ended may take so long to clean up.
_END_SECONDS = 5.0

Send = Callable[[Message], None]


def probe_node(request: ProbeRequest) -> NodeReport:
    """Probe the machine this runs on; the scheduler adds what it calls the node."""
    report = NodeReport(node="", name=socket.gethostname(), autoprec=__version__)
    try:
        machine = probing.probe_here(device=request.device)
    except AutoprecError as error:
        return replace(report, problem=str(error))
    best, *more = machine.facts
    others = {each.name for each in more if each.kind == best.kind} - {best.name}
    return replace(
        report,
        facts=best,
        software=machine.software,
        others=tuple(sorted(others)),
        problem=_task_problem(request.place),
    )


def _task_problem(place: TaskPlace) -> str:
    """Return why the task cannot be run on this machine as it is where the command was given."""
    if not place.task.path.is_file():
        return (
            f"the file {place.task.path} is not there; put it on a file system that the nodes "
            "share, or send its folder with the job (Ray: ray job submit --working-dir)"
        )
    if source_digest(place.task) != place.digest:
        return f"{place.task.path} there, or a module it imports, is another version; update it"
    return ""


def tune_here(request: bytes, send: Send) -> None:
    """Tune on this machine; send every event, the journal when it grows, and how it ended.

    The request is a line that `request_to_line` wrote.
    """
    try:
        send(_tune(request_from_line(request), send))
    except AutoprecError as error:
        send(error)
    except Exception as error:
        failure = TrialFailure(f"autoprec failed on the node: {type(error).__name__}: {error}")
        failure.add_note("".join(traceback.format_exception(error)))
        send(failure)


def _tune(request: Request, send: Send) -> Profile:
    with contextlib.suppress(OSError):  # relative paths in a task start where the command was given
        os.chdir(request.place.folder)
    machine = probing.probe_here(device=request.device)
    best = machine.facts[0]
    with tempfile.TemporaryDirectory(prefix="autoprec-study-") as folder:
        journal = Path(folder) / "study.journal"
        journal.write_text(request.journal, encoding="utf-8")
        listen = _Listener(journal, send)
        if request.out_of_memory:
            record_out_of_memory(journal, request.out_of_memory)
        target = Target(
            facts=_facts_of_type(best, request),
            software=machine.software,
            measure=lambda known: probing.measure_device(known, machine.frameworks_installed),
            unusable=() if request.device else machine.unusable,
            peers=peers_of(best, machine.facts),
        )
        options = replace(request.options, storage=request.options.storage or str(journal))
        try:
            return tuner.tune(TuningJob(request.place.task, target, options, listen))
        finally:
            listen.send_journal()


def _facts_of_type(facts: DeviceFacts, request: Request) -> DeviceFacts:
    """Return this machine's device as one of its type: with the least memory of the type."""
    if not is_same_type(facts.fingerprint, request.fingerprint):
        raise TrialFailure(
            f"the device here is {facts.name}, the type to be tuned is "
            f"{request.fingerprint.name or request.fingerprint.family}: the node has changed since "
            "it was probed. Run the same command again"
        )
    if request.memory_bytes is None:
        return facts
    return replace(facts, observation=replace(facts.observation, memory_bytes=request.memory_bytes))


class _Listener:
    """Sends a tuning's events, and before each the journal if that has grown."""

    def __init__(self, journal: Path, send: Send) -> None:
        self._journal, self._send = journal, send
        self._sent, self._shown = journal.stat().st_size, 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress):
            now = time.monotonic()
            if now - self._shown < _PROGRESS_SECONDS:
                return
            self._shown = now
        else:
            self.send_journal()
        self._send(event)

    def send_journal(self) -> None:
        """Send what was written after the last event."""
        size = self._journal.stat().st_size
        if size != self._sent:
            self._sent = size
            self._send(Journal(read_journal(self._journal)))


def main() -> int:
    """Answer the request in a file; return the exit code."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything else prints is no message

    def send(message: Message) -> None:
        answers.write(to_line(message))
        answers.flush()

    answered = threading.Event()
    threading.Thread(target=_end_with_stdin, args=(answered,), daemon=True).start()
    action, file = sys.argv[1:]
    line = Path(file).read_bytes()
    if action == "tune":
        tune_here(line, send)
        answered.set()
    else:
        report = probe_node(probe_from_line(line))
        answered.set()
        send(replace(report, node=os.environ.get("SLURMD_NODENAME", "")))
    return 0


def _end_with_stdin(answered: threading.Event) -> None:
    """End this process, with its workers, if its driver has ended before it had the answer."""
    while os.read(0, 4096):
        pass
    if not answered.is_set():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_END_SECONDS)
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
