"""What the driver of a cluster's tuning and a node say to each other.

The values are pickled; both sides run the same version of autoprec, which the probe checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autoprec.core.device.facts import Fingerprint
from autoprec.core.profile import Profile
from autoprec.errors import AutoprecError
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
