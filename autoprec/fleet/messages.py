"""What the driver of a cluster's tuning asks of a scheduler, and what nodes say, as lines of JSON.

Lines are read as strictly as a profile is: nothing in a line can make its reader run anything. Both
sides run the same version of autoprec, which the probe checks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

from autoprec import errors
from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.device.facts import Fingerprint
from autoprec.core.fleet.node_types import NodeReport
from autoprec.core.profile import Profile
from autoprec.errors import AutoprecError, UsageError, UserCodeError
from autoprec.tuning.events import Event
from autoprec.tuning.options import Options
from autoprec.workers.task_source import TaskSource


@dataclass(frozen=True)
class Request:
    """What a node is asked for: the tuning of a type, or its probe if there are no `options`.

    Every node has the task at the same path, with code of the same `digest`, and works in `folder`.
    `device` is the setting of that name, `memory_bytes` the least memory of the type's nodes.
    `journal` holds the trials so far, which the driver keeps. `out_of_memory` is set if the tuning
    before was ended for lack of memory: the trial that was running then does not fit.
    """

    task: TaskSource
    digest: str
    folder: Path
    device: str | None = None
    options: Options | None = None
    fingerprint: Fingerprint | None = None
    memory_bytes: int | None = None
    journal: str = ""
    out_of_memory: str = ""

    def to_line(self) -> bytes:
        """Write the request as one line of JSON."""
        return json.dumps(to_plain(self)).encode()

    @classmethod
    def from_line(cls, line: bytes) -> Request:
        """Read what `to_line` wrote; `UsageError` says which option cannot be met here."""
        try:
            return from_plain(cls, json.loads(line))
        except DecodeError as error:
            raise UsageError(f"a node of the cluster cannot do what is asked: {error}") from error


@dataclass(frozen=True)
class Journal:
    """The whole journal of a tuning, as it stands: lines of text."""

    text: str


#: A tuning says events and journals, and ends with a profile or an error. A probe says a report.
Message = Event | Journal | Profile | AutoprecError | NodeReport

_ERRORS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, AutoprecError)
}
_VALUES: dict[str, Any] = {
    kind.__name__: kind for kind in (*get_args(Event), Journal, Profile, NodeReport)
}


def to_line(message: Message) -> bytes:
    """Write a message as one line of JSON, its end of line included."""
    name, plain = type(message).__name__, to_plain(message)
    if isinstance(message, AutoprecError):
        # A subclass that only the sender knows travels as what it is a kind of.
        name = next(kind.__name__ for kind in type(message).__mro__ if kind.__name__ in _ERRORS)
        frames = [message.frames] if isinstance(message, UserCodeError) else []
        plain = [str(message), *frames]
    return json.dumps({"kind": name, "value": plain}).encode() + b"\n"


def from_line(line: bytes) -> Message:
    """Read what `to_line` wrote; `DecodeError` says what does not fit."""
    plain = json.loads(line)
    name, value = plain["kind"], plain["value"]
    if name in _ERRORS:
        return _ERRORS[name](*value)
    if name not in _VALUES:
        raise DecodeError("kind", f"{name!r} given, expected one of {[*_VALUES, *_ERRORS]}")
    message: Message = from_plain(_VALUES[name], value, name)
    return message


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

    def probe(self, request: Request) -> Sequence[NodeReport]:
        """Probe every node; one that cannot be probed has a `problem`."""

    def start(self, node: NodeReport, request: Request) -> Session:
        """Begin a tuning on a node, with the whole device reserved for it.

        Raises `NodeLost` and `NoRoom`, as `receive` does.
        """
