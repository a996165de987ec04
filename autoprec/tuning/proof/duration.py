"""How long a recipe's check is expected to take, by the steps that it makes and what they took.

The steps are plain float32's, which trains as often as a candidate does and is seldom faster. What
builds the model is not counted: it takes a worker less than the margin.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.core.dtypes import Policy
from autoprec.core.numerics.proof_steps import PROOF_LENGTHS, SHORT_STEPS, usual_steps
from autoprec.core.numerics.reference_recipe import is_exact, is_reference, settings_of
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import BATCH, Space
from autoprec.core.speed.trial_results import Outcome

SHORTEST_STEPS = PROOF_LENGTHS[0]
"""The steps that the shortest check trains for."""

#: Comparing settings with plain float32: five batches each way, perturbed ones, and updates.
_SETTINGS_STEPS = 25

#: What tells how long a step takes, and a margin for noise and what else a test may ask for.
_MORE_STEPS = 18

#: What a call of the task's `evaluate` is taken to need, and how often a check calls it: to compare
#: settings, and after each training. That of a small transformer takes five steps.
_EVALUATION_STEPS, _EVALUATIONS_OF_SETTINGS, _EVALUATIONS_OF_TRAININGS = 5, 4, 5


def check_steps(recipe: Recipe, steps: int, *, evaluated: bool) -> int:
    """Return what the check of a recipe takes, in float32 steps, if its training makes so many.

    `evaluated` says that the task has its own `evaluate`. What is plain float32 takes none.
    """
    needed, calls = 0, 0
    if settings_of(recipe):
        needed, calls = _SETTINGS_STEPS, _EVALUATIONS_OF_SETTINGS
    if not is_exact(recipe):
        needed += _MORE_STEPS + usual_steps(steps, evaluated=evaluated)
        calls += _EVALUATIONS_OF_TRAININGS
    return needed + (calls * _EVALUATION_STEPS if evaluated else 0)


def check_seconds(
    outcome: Outcome,
    history: Sequence[Outcome],
    space: Space,
    *,
    evaluated: bool,
    steps: int = SHORTEST_STEPS,
    share: float = 1.0,
) -> float:
    """Return the seconds of a check of a trial's recipe that trains for `steps`; 0: it needs none.

    They are those of this `share` of all its steps. What was compiled is compiled again: for its
    settings, at the same weights, and to train.
    """
    recipe, rate = space.recipe(outcome.point), _float32_rate(history, space) or outcome.rate
    if is_reference(recipe) or outcome.measurement is None or not rate:
        return 0.0
    compiling = 3 * outcome.measurement.warmup_seconds if recipe.compile else 0.0
    needed = share * check_steps(recipe, steps, evaluated=evaluated)
    return needed * int(outcome.point[BATCH]) / rate + compiling


def seconds_to_keep_free(
    history: Sequence[Outcome], space: Space, *, evaluated: bool
) -> tuple[float, ...]:
    """Return what checking the fastest recipe takes, and what its shortest check does.

    Nothing where that is float32's arithmetic: it is not trained.
    """
    ran = [outcome for outcome in history if outcome.rate > 0]
    leader = max(ran, key=lambda outcome: outcome.rate, default=None)
    if leader is None or is_exact(space.recipe(leader.point)):
        return ()
    return tuple(
        check_seconds(leader, history, space, steps=steps, evaluated=evaluated)
        for steps in (SHORT_STEPS, SHORTEST_STEPS)
    )


def _float32_rate(history: Sequence[Outcome], space: Space) -> float:
    """Return the samples a second of plain float32, which a check trains; 0 if it did not run.

    Where only float32 with settings ran, it is that.
    """
    float32 = [each for each in history if each.point["policy"] == Policy.FLOAT32.value]
    plain = [each for each in float32 if is_reference(space.recipe(each.point))]
    return max((each.rate for each in plain or float32), default=0.0)
