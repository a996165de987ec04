"""What runs on a node of a cluster: its probe, and the tuning of its type.

No scheduler is known here. The tuning is the one of a single machine, its worker processes
included; only its journal is a copy, and its events are sent to the driver.

As a program (`python -m autoprec.fleet.node FILE`) it answers the request in a file by messages on
stdout, and ends when its stdin does: its driver is gone then.
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
from autoprec.fleet.messages import Journal, Message, Request, to_line
from autoprec.tuning.events import Event, Progress
from autoprec.tuning.flow import tuner
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.ranks import peers_of
from autoprec.tuning.study.study import record_out_of_memory
from autoprec.version import __version__
from autoprec.workers.task_digest import source_digest

#: Progress is for people: more of it than this is not sent.
_PROGRESS_SECONDS = 1.0

#: A tuning whose driver has ended may take so long to clean up.
_END_SECONDS = 5.0

Send = Callable[[Message], None]


def answer(request: bytes, send: Send) -> None:
    """Probe or tune this machine, as a line of JSON asks; send what happens and how it ended."""
    try:
        asked = Request.from_line(request)
        if asked.options is None:
            send(probe_node(asked))
        else:
            send(_tune(asked, asked.options, send))
    except AutoprecError as error:
        send(error)
    except Exception as error:
        failure = TrialFailure(f"autoprec failed on the node: {type(error).__name__}: {error}")
        failure.add_note("".join(traceback.format_exception(error)))
        send(failure)


def probe_node(request: Request) -> NodeReport:
    """Probe the machine this runs on; the scheduler adds what it calls the node."""
    name = os.environ.get("SLURMD_NODENAME", "")
    report = NodeReport(node=name, name=socket.gethostname(), autoprec=__version__)
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
        problem=_task_problem(request),
    )


def _task_problem(request: Request) -> str:
    """Return why the task cannot be run on this machine as it is where the command was given."""
    if not request.task.path.is_file():
        return (
            f"the file {request.task.path} is not there; put it on a file system that the nodes "
            "share, or send its folder with the job (Ray: ray job submit --working-dir)"
        )
    if source_digest(request.task) != request.digest:
        return f"{request.task.path} there, or a module it imports, is another version; update it"
    return ""


def _tune(request: Request, options: Options, send: Send) -> Profile:
    """Tune on this machine; send every event, and the journal before it if that has grown."""
    with contextlib.suppress(OSError):  # relative paths in a task start where the command was given
        os.chdir(request.folder)
    machine = probing.probe_here(device=request.device)
    best = machine.facts[0]
    with tempfile.TemporaryDirectory(prefix="autoprec-study-") as folder:
        journal = Path(folder) / "study.journal"
        journal.write_text(request.journal, encoding="utf-8")
        if request.out_of_memory:
            record_out_of_memory(journal, request.out_of_memory)
        sent, shown = len(request.journal.encode()), 0.0

        def send_journal() -> None:
            nonlocal sent
            size = journal.stat().st_size
            if size != sent:
                sent = size
                send(Journal(read_journal(journal)))

        def listen(event: Event) -> None:
            nonlocal shown
            if isinstance(event, Progress):
                if time.monotonic() - shown < _PROGRESS_SECONDS:
                    return
                shown = time.monotonic()
            else:
                send_journal()
            send(event)

        target = Target(
            facts=_facts_of_type(best, request),
            software=machine.software,
            measure=probing.measure_device,
            unusable=() if request.device else machine.unusable,
            peers=peers_of(best, machine.facts),
        )
        stored = replace(options, storage=options.storage or str(journal))
        try:
            return tuner.tune(TuningJob(request.task, target, stored, listen))
        finally:
            send_journal()


def _facts_of_type(facts: DeviceFacts, request: Request) -> DeviceFacts:
    """Return this machine's device as one of its type: with the least memory of the type."""
    kind = request.fingerprint
    if kind is not None and not is_same_type(facts.fingerprint, kind):
        raise TrialFailure(
            f"the device here is {facts.name}, the type to be tuned is {kind.name or kind.family}: "
            "the node has changed since it was probed. Run the same command again"
        )
    if request.memory_bytes is None:
        return facts
    return replace(facts, observation=replace(facts.observation, memory_bytes=request.memory_bytes))


def main() -> int:
    """Answer the request in a file; return the exit code."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything else prints is no message
    answered = threading.Event()

    def send(message: Message) -> None:
        if isinstance(message, Profile | AutoprecError | NodeReport):
            answered.set()
        answers.write(to_line(message))
        answers.flush()

    threading.Thread(target=_end_with_stdin, args=(answered,), daemon=True).start()
    answer(Path(sys.argv[1]).read_bytes(), send)
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
