"""What the driver of a cluster's tuning and a node say to each other.

It travels as lines of JSON, read as strictly as a profile is: nothing in one can make its reader
run anything. Both sides run the same version of autoprec, which the probe checks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from autoprec import errors
from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.device.facts import Fingerprint
from autoprec.core.profile import Profile
from autoprec.errors import AutoprecError, UsageError
from autoprec.tuning.events import Event
from autoprec.tuning.options import Options


@dataclass(frozen=True)
class TaskPlace:
    """Where a task is on every node: its file, the digest of its code, the folder to run in."""

    task: Path
    digest: str
    folder: Path


@dataclass(frozen=True)
class Request:
    """One type's tuning, as a node is asked for it.

    `journal` holds the trials so far, which the driver keeps. `device` is the setting of that name,
    `memory_bytes` the least memory of the type's nodes. `out_of_memory` is set where the tuning
    before was ended for lack of memory: the trial that was running then does not fit.
    """

    place: TaskPlace
    options: Options
    fingerprint: Fingerprint
    memory_bytes: int | None
    device: str | None = None
    journal: bytes = b""
    out_of_memory: str = ""


@dataclass(frozen=True)
class Update:
    """An event of a tuning, and what was added to its journal since the last one, at `offset`.

    `journal` holds whole lines. `event` is None where only the journal has grown.
    """

    event: Event | None
    journal: bytes = b""
    offset: int = 0


@dataclass(frozen=True)
class Ended:
    """The tuning is over: its profile, or the error that ended it."""

    profile: Profile | None = None
    error: AutoprecError | None = None


Message = Update | Ended

#: How a journal, which may hold any bytes, is written as text.
_TEXT = ("utf-8", "surrogateescape")

_EVENTS = {kind.__name__: kind for kind in get_args(Event)}
_ERRORS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, AutoprecError)
}


def request_to_line(request: Request) -> bytes:
    """Write a request as one line of JSON."""
    plain = to_plain(replace(request, journal=b"")) | {"journal": _text(request.journal)}
    return json.dumps(plain).encode()


def request_from_line(line: bytes) -> Request:
    """Read what `request_to_line` wrote; `UsageError` says which option cannot be met here."""
    plain = json.loads(line)
    journal = plain.pop("journal").encode(*_TEXT)
    try:
        return replace(from_plain(Request, plain), journal=journal)
    except DecodeError as error:
        raise UsageError(f"a node of the cluster cannot do what is asked: {error}") from error


def to_line(message: Message) -> bytes:
    """Write a message as one line of JSON, its end of line included."""
    if isinstance(message, Ended):
        plain: dict[str, Any] = {"profile": to_plain(message.profile)}
        plain["error"] = None if message.error is None else _plain_error(message.error)
    else:
        plain = {
            "event": None if message.event is None else _named(message.event),
            "journal": _text(message.journal),
            "offset": message.offset,
        }
    return json.dumps(plain).encode() + b"\n"


def from_line(line: bytes) -> Message:
    """Read what `to_line` wrote; `DecodeError` says what does not fit."""
    plain = json.loads(line)
    if "event" not in plain:
        return Ended(
            from_plain(Profile | None, plain["profile"], "profile"),  # type: ignore[arg-type]
            None if plain["error"] is None else _error(plain["error"]),
        )
    event = plain["event"]
    return Update(
        None if event is None else _event(event),
        plain["journal"].encode(*_TEXT),
        from_plain(int, plain["offset"], "offset"),
    )


def _text(journal: bytes) -> str:
    return journal.decode(*_TEXT)


def _named(event: Event) -> dict[str, Any]:
    return {"kind": type(event).__name__, "value": to_plain(event)}


def _event(plain: dict[str, Any]) -> Event:
    if plain["kind"] not in _EVENTS:
        raise DecodeError("event.kind", f"{plain['kind']!r} given, expected one of {[*_EVENTS]}")
    event: Event = from_plain(_EVENTS[plain["kind"]], plain["value"], "event")
    return event


def _plain_error(error: AutoprecError) -> dict[str, str]:
    frames = error.frames if isinstance(error, errors.UserCodeError) else ""
    return {"kind": type(error).__name__, "message": str(error), "frames": frames}


def _error(plain: dict[str, str]) -> AutoprecError:
    kind = _ERRORS.get(plain["kind"], AutoprecError)  # a subclass that only the sender knows
    if issubclass(kind, errors.UserCodeError):
        return kind(plain["message"], plain["frames"])
    return kind(plain["message"])
