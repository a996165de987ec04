"""The side of Ray that is on a node: a probe as a task, and a tuning as an actor.

Ray itself is not imported here: the driver makes remote functions and classes of what it finds.
"""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path

from autoprec.core.fleet.node_types import NodeReport
from autoprec.fleet import node
from autoprec.fleet.messages import Message, TaskPlace

#: Libraries start so many threads; Ray sets it to the CPUs a task or actor reserves.
_THREADS_VARIABLE = "OMP_NUM_THREADS"


def probe(place: TaskPlace, device: str | None) -> NodeReport:
    """Probe the node that this task runs on."""
    return node.probe_node(place, device)


def forget_ray_threads() -> None:
    """Take back the number of threads that Ray has set; one set on the node itself is kept.

    A tuning measures what training will do, which starts outside of Ray.
    """
    if not _set_on_node():
        os.environ.pop(_THREADS_VARIABLE, None)


def _set_on_node() -> bool:
    """Say whether the variable comes from Ray's node process, whose child this one is."""
    try:
        inherited = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:  # not Linux
        return False
    return any(each.startswith(f"{_THREADS_VARIABLE}=".encode()) for each in inherited)


class TuningActor:
    """A tuning on this node, whose messages the driver fetches.

    It runs in a thread, so that messages can be fetched meanwhile. When the driver ends, Ray ends
    this process, and with it the tuning's worker processes.
    """

    def __init__(self, request: bytes) -> None:
        forget_ray_threads()
        self._messages: queue.Queue[Message] = queue.Queue()
        self._thread = threading.Thread(
            target=node.tune_here, args=(request, self._messages.put), daemon=True
        )

    def start(self) -> int:
        """Begin; return this process's id."""
        self._thread.start()
        return os.getpid()

    def messages(self, seconds: float) -> list[Message]:
        """Wait up to `seconds` for a message; return it and those that came with it."""
        try:
            found = [self._messages.get(timeout=seconds)]
        except queue.Empty:
            return []
        while True:
            try:
                found.append(self._messages.get_nowait())
            except queue.Empty:
                return found
