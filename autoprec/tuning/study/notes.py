"""What a study keeps beside its trials, from which a stopped tuning goes on: each note, its type.

Who keeps a note also reads it first, and works only where there is none. Trials are in `study`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.policies import Refusal
from autoprec.core.measurement import TaskFacts
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.numerics.proof_steps import ProofLength
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.core.speed.trial_results import Outcome
from autoprec.tuning.stage_results import NeededIslands, ProvenRecipe
from autoprec.tuning.trials import Measured

T = TypeVar("T")


@dataclass(frozen=True)
class StudyNote(Generic[T]):
    """A name that something is kept under, and the type that it is read as."""

    name: str
    kind: type[T]

    def of(self, *parts: object) -> StudyNote[T]:
        """Return the note of one recipe, one policy or the like."""
        return replace(self, name=":".join([self.name, *map(str, parts)]))


@dataclass(frozen=True)
class KeptRace:
    """What a race told; `searched` are the rates of the search before it."""

    searched: tuple[float, ...]
    ranking: tuple[Outcome, ...]
    recipes: tuple[Recipe, ...]
    measured: Measured
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True)
class StoredProfile:
    """A finished tuning, with the limits it was finished under."""

    profile: Profile
    limits: str


TASK_PATH = StudyNote("task_path", str)
"""The task file."""

TASK = StudyNote("task", TaskFacts)
"""The task as it was described by its first step."""

FACTS = StudyNote("facts", DeviceFacts)
"""The device, with the measured rates of its matrix products."""

SPACE = StudyNote("space", str)
"""The name of the space that the study's own trials are of."""

FIRST_TRIAL = StudyNote("since", int)
"""The number of the first trial that counts: the machine was at another speed before."""

OUTCOME = StudyNote("outcome", Outcome)
"""How a trial ended; kept with the trial."""

NEEDED_ISLANDS = StudyNote("needed islands", NeededIslands)
"""The modules that a policy cannot run without in float32, by policy."""

RACE = StudyNote("race", KeptRace)
"""The race of the fastest recipes."""

NOISE_SCALE = StudyNote("noise", NoiseScale)
"""The gradient's noise scale, by recipe."""

PROOF_LENGTHS = StudyNote("proof lengths", dict[str, ProofLength])
"""How long proofs are, of each batch, by the limits of their time."""

PROOF = StudyNote("proof", ProvenRecipe)
"""A recipe that passed its check, by what bounds checks and by recipe."""

RESULT = StudyNote("result", StoredProfile)
"""The profile of a tuning that has ended."""
