"""Results of tunings, for the tests of what a profile says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from factories import steady

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.profile import NOT_COMPARED
from autoprec.core.recipe import Recipe
from autoprec.core.speed.selection import Choice
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.stage_results import (
    ConfirmationResult,
    PreflightResult,
    ProofResult,
    SearchResult,
    TuningResult,
)
from autoprec.tuning.trials import Trials

BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16)
SPACE = Space((Policy.FLOAT32, Policy.MIXED_BFLOAT16), (8, 16, 32, 64, 128), compile=(False, True))
TASK = TaskFacts("torch", {}, 32, 32, 1000)


def timed(step: float = 0.1, *, peak: int = 1000, **others: Any) -> Measurement:
    return steady(step, peak_memory_bytes=peak, **others)


def result_of(
    history: Sequence[Outcome],
    *,
    task: TaskFacts = TASK,
    rehearsal: bool = False,
    alignment: int = 1,
    **search: Any,
) -> TuningResult:
    """A tuning that measured these trials, and kept the baseline."""
    facts = cast(Any, SimpleNamespace(observation=SimpleNamespace(rehearsal=rehearsal)))
    trials = Trials(task, SPACE, tuple(history), rehearsal)
    return TuningResult(
        PreflightResult(task, facts, SPACE, alignment),
        SearchResult(trials, SPACE.point(Recipe()), **search),
        ProofResult(),
        ConfirmationResult(Choice(Recipe(), NOT_COMPARED, "")),
    )


def found(*history: Outcome, **others: Any) -> TuningResult:
    plain = Outcome(SPACE.point(Recipe()), Status.OK, timed())
    return result_of((plain, *history), **others)


def with_confirmation(result: TuningResult, **fields: Any) -> TuningResult:
    return replace(result, confirmation=replace(result.confirmation, **fields))
