"""Measures what rounding the vocabulary in the model would bring, where padding it did not pay.

Padding while the model runs copies the weights in every forward pass; a model that is built with
rounded sizes does not. Which brings how much depends on the device, so it is timed, and told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoprec.core.measurement import TaskFacts
from autoprec.core.number_words import percent
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import COMPILE_MODE, COMPILE_SCOPE, FLOAT8, Alignment, Recipe
from autoprec.core.speed.noise import is_faster
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.tuning.events import Note, Stage
from autoprec.tuning.job import TuningJob
from autoprec.tuning.stage_results import PreflightResult
from autoprec.tuning.time_limit import CONFIRMATION_SHARE
from autoprec.workers.failures import WorkerFailure
from autoprec.workers.runner import Runner

ROUNDS = 5
_TURN = TimingBudget(seconds=0.5, min_steps=3)

#: Of the time that is left, a measurement which only advises may take a part.
_LEAST_SECONDS = 60.0

_OF_COMPILED = (COMPILE_MODE, COMPILE_SCOPE, FLOAT8)


@dataclass(frozen=True)
class RoundedVocabulary:
    """A vocabulary, its rounded size, and the speed of a model built with that over the present."""

    size: int
    rounded: int
    gain: Ratio

    @property
    def text(self) -> str:
        """Say what was measured, and what to do."""
        measured = f"vocabulary {self.size}: {self.rounded} in the model itself"
        if is_faster(self.gain):
            brings = percent(self.gain.ratio - 1)
            return f"{measured} would bring {brings} ({self.gain.in_words(3)}); build it with that"
        return f"{measured} brings nothing ({self.gain.in_words(3)})"


def vocabulary_to_round(task: TaskFacts, alignments: tuple[Alignment, ...]) -> tuple[int, int]:
    """Return the size of the vocabulary that padding was tried on, and what it rounds to; or 0, 0.

    A vocabulary is what an embedding has words and a linear layer of the same size outputs.
    """
    multiple = max(each.multiple for each in alignments)
    words = {each.size for each in task.dimensions if each.name == "num_embeddings"}
    outputs = {each.size for each in task.dimensions if each.name == "out_features"}
    off = [size for size in words & outputs if size % multiple]
    largest = max(off, default=0)
    return (largest, -(-largest // multiple) * multiple) if largest else (0, 0)


def measure_rounding(
    job: TuningJob, preflight: PreflightResult, recipe: Recipe, runner: Runner
) -> RoundedVocabulary | None:
    """Time the chosen recipe, not compiled, with and without the vocabulary rounded.

    None where padding was not plausible, pays in the recipe, or there is no time or memory left.
    """
    size, rounded = vocabulary_to_round(preflight.task, preflight.space.alignments)
    hurried = job.deadline.left(CONFIRMATION_SHARE) < _LEAST_SECONDS
    if not size or recipe.alignment.modules or job.options.nproc > 1 or hurried:
        return None
    knobs = {name: value for name, value in recipe.knobs.items() if name not in _OF_COMPILED}
    plain = replace(recipe, compile=False, knobs=knobs)
    job.listener(Stage("rounding", f"a vocabulary of {rounded} in place of {size}"))
    try:
        gain: Ratio | None = runner.call(
            "rounding_gain",
            recipe=plain,
            seed=job.options.seed,
            sizes=(size, rounded),
            budget=_TURN,
            rounds=ROUNDS,
        )
    except WorkerFailure as failure:
        job.listener(Note(f"a rounded vocabulary was not measured: {failure.message[:200]}"))
        return None
    return None if gain is None else RoundedVocabulary(size, rounded, gain)
