"""What a scheduler of a cluster does for a tuning: it probes nodes and runs a tuning on one.

A scheduler is one file of this folder. It knows neither profiles nor journals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autoprec.core.fleet.node_types import NodeReport
from autoprec.fleet.messages import Message, ProbeRequest, Request


class NodeLost(Exception):
    """What ran on a node has ended without a word; the node itself may still be there.

    `out_of_memory` is set if it was ended for lack of memory. With `gone` the node is lost, too.
    """

    def __init__(self, reason: str, *, out_of_memory: bool = False, gone: bool = False) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory
        self.gone = gone


class NoRoom(Exception):
    """A node has no room for a tuning, or none yet."""


class Session(Protocol):
    """A tuning that runs on a node."""

    def receive(self) -> Sequence[Message]:
        """Return what has arrived, without waiting; raise `NodeLost` or `NoRoom`."""

    def stop(self) -> None:
        """End the tuning and everything it started."""


class Scheduler(Protocol):
    """A cluster that this process may use."""

    def probe(self, request: ProbeRequest) -> Sequence[NodeReport]:
        """Probe every node; one that cannot be probed has a `problem`."""

    def start(self, node: NodeReport, request: Request) -> Session:
        """Begin a tuning on a node, with the whole device reserved for it.

        Raises `NodeLost` and `NoRoom`, as `receive` does.
        """
