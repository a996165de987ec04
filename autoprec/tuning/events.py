"""The events of a tuning: one stream that the terminal, JSON, a notebook or a log read.

Events are values; the listener decides what to show. Tuning itself prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.policies import Proposal
from autoprec.core.measurement import OperatorTime, TaskFacts
from autoprec.core.numerics.traces import UnitTrace
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.core.speed.trial_results import Outcome


@dataclass(frozen=True)
class Started:
    """The device and the policies are known; `storage` is where the study is kept."""

    task: str
    facts: DeviceFacts
    proposal: Proposal
    storage: str


@dataclass(frozen=True)
class Described:
    """Preflight passed; `resumed` finished trials were found in the study."""

    facts: TaskFacts
    resumed: int
    points: int


@dataclass(frozen=True)
class Stage:
    """A stage begins: "preflight", "search", "reranking", "proof", "confirmation", and others."""

    name: str
    detail: str = ""


@dataclass(frozen=True)
class Progress:
    """A worker is in this phase at this step."""

    phase: str
    step: int


@dataclass(frozen=True)
class TrialStarted:
    """A trial begins."""

    number: int
    recipe: Recipe
    reason: str


@dataclass(frozen=True)
class TrialFinished:
    """A trial ended; `best` is the throughput of the best one so far."""

    number: int
    recipe: Recipe
    outcome: Outcome
    best: float
    baseline: float


@dataclass(frozen=True)
class Judged:
    """A recipe was proven, or not."""

    recipe: Recipe
    verdict: str
    reason: str


@dataclass(frozen=True)
class Explained:
    """How large every module's numbers are under a recipe; sent only with `explain` set."""

    recipe: Recipe
    units: tuple[UnitTrace, ...]


@dataclass(frozen=True)
class Profiled:
    """Which operators take the time of the chosen recipe's step; sent only with `explain` set."""

    recipe: Recipe
    operators: tuple[OperatorTime, ...]


@dataclass(frozen=True)
class Round:
    """One round of interleaved timing: each finalist's samples a second, 0 where it was dropped."""

    number: int
    of: int
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Note:
    """Something the user should know."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Finished:
    """The profile is made; `storage` is its study's place, `from_study` that it was made before."""

    profile: Profile
    outcomes: tuple[Outcome, ...]
    storage: str
    from_study: bool = False


Event = (
    Started
    | Described
    | Stage
    | Progress
    | TrialStarted
    | TrialFinished
    | Judged
    | Explained
    | Profiled
    | Round
    | Note
    | Finished
)
Listener = Callable[[Event], None]


def silent(event: Event) -> None:
    """Listen to nothing."""
