"""A finished tuning as a study to look at: optuna-dashboard names the recipe that was chosen.

The study of the search holds raw rates, of which the highest need not be the choice: a recipe can
fail its proof, or be no faster in the confirmation than a simpler one. Here a trial is complete
where its value decided: the chosen recipe, and the baseline where that is slower. What cannot be
chosen is infeasible and has the worst value, 0; what the search set aside is pruned, its rate the
intermediate value.
"""

from __future__ import annotations

from autoprec.core.profile import Profile
from autoprec.core.recipe import plain_recipe
from autoprec.core.speed.space import point_key
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.stage_results import TuningResult
from autoprec.tuning.study.study import FinalTrial, Study


def write_final_study(study: Study, result: TuningResult, profile: Profile) -> None:
    """Write the study of a finished tuning beside the search's, replacing an earlier one."""
    space, evidence = result.trials.space, profile.evidence
    chosen = dict(space.point(result.confirmation.choice.recipe))
    baseline = dict(result.search.baseline_point)
    named = {point_key(o.point): o for o in result.trials.history}
    trials = []
    for outcome in named.values():
        point, refused = dict(outcome.point), _why_refused(outcome, profile)
        if point == chosen:
            rate = evidence.chosen.samples_per_second
            trials.append(
                FinalTrial(point, rate, "chosen", attributes=plain_recipe(profile.recipe))
            )
        elif refused:
            trials.append(FinalTrial(point, 0.0, "infeasible", reason=refused))
        elif point == baseline and _slower(profile):
            rate = evidence.baseline.samples_per_second
            trials.append(FinalTrial(point, rate, "baseline"))
        else:
            trials.append(FinalTrial(point, outcome.rate, "set aside"))
    study.write_final(trials, space.levels(), profile.evidence.reason)


def _slower(profile: Profile) -> bool:
    evidence = profile.evidence
    return evidence.baseline.samples_per_second < evidence.chosen.samples_per_second


def _why_refused(outcome: Outcome, profile: Profile) -> str:
    """Say why a recipe could not be chosen: it failed, or its policy was refused; "" elsewhere."""
    if outcome.status is not Status.OK:
        return f"{outcome.status.value}: {outcome.reason}"
    policy = outcome.point["policy"]
    if policy == profile.recipe.policy.value:
        return ""
    refusals = profile.evidence.refusals
    return next((each.reason for each in refusals if each.candidate == policy), "")
