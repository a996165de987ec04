"""What the driver of a cluster's tuning and a node say to each other.

It travels as lines of JSON, read as strictly as a profile is: nothing in one can make its reader
run anything. Both sides run the same version of autoprec, which the probe checks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from autoprec import errors
from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.device.facts import Fingerprint
from autoprec.core.fleet.node_types import NodeReport
from autoprec.core.profile import Profile
from autoprec.errors import AutoprecError, UsageError
from autoprec.tuning.events import Event
from autoprec.tuning.options import Options
from autoprec.workers.task_source import TaskSource


@dataclass(frozen=True)
class TaskPlace:
    """Where a task is on every node: its source, the digest of its code, the folder to run in."""

    task: TaskSource
    digest: str
    folder: Path


@dataclass(frozen=True)
class ProbeRequest:
    """What a node is probed for; `device` is the setting of that name."""

    place: TaskPlace
    device: str | None


@dataclass(frozen=True)
class Request:
    """One type's tuning, as a node is asked for it.

    `journal` holds the trials so far, which the driver keeps. `device` is the setting of that name,
    `memory_bytes` the least memory of the type's nodes. `out_of_memory` is set if the tuning before
    was ended for lack of memory: the trial that was running then does not fit.
    """

    place: TaskPlace
    options: Options
    fingerprint: Fingerprint
    memory_bytes: int | None
    device: str | None = None
    journal: str = ""
    out_of_memory: str = ""


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


def request_to_line(request: Request | ProbeRequest) -> bytes:
    """Write a request as one line of JSON."""
    return json.dumps(to_plain(request)).encode()


def request_from_line(line: bytes) -> Request:
    """Read the request for a tuning; `UsageError` says which option cannot be met here."""
    try:
        return from_plain(Request, json.loads(line))
    except DecodeError as error:
        raise UsageError(f"a node of the cluster cannot do what is asked: {error}") from error


def probe_from_line(line: bytes) -> ProbeRequest:
    """Read the request for a probe."""
    return from_plain(ProbeRequest, json.loads(line))


def to_line(message: Message) -> bytes:
    """Write a message as one line of JSON, its end of line included."""
    if not isinstance(message, AutoprecError):
        return _line(type(message).__name__, to_plain(message))
    # A subclass that only the sender knows travels as what it is a kind of.
    kinds = [each.__name__ for each in type(message).__mro__ if each.__name__ in _ERRORS]
    frames = message.frames if isinstance(message, errors.UserCodeError) else ""
    return _line(kinds[0], {"message": str(message), "frames": frames})


def from_line(line: bytes) -> Message:
    """Read what `to_line` wrote; `DecodeError` says what does not fit."""
    plain = json.loads(line)
    name, value = plain["kind"], plain["value"]
    if name in _ERRORS:
        kind = _ERRORS[name]
        more = [value["frames"]] if issubclass(kind, errors.UserCodeError) else []
        return kind(value["message"], *more)
    if name not in _VALUES:
        raise DecodeError("kind", f"{name!r} given, expected one of {[*_VALUES, *_ERRORS]}")
    message: Message = from_plain(_VALUES[name], value, name)
    return message


def _line(kind: str, plain: Any) -> bytes:
    return json.dumps({"kind": kind, "value": plain}).encode() + b"\n"
