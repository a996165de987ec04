"""A finished tuning as a study to look at: optuna-dashboard names the recipe that was chosen.

The study of the search holds raw rates, of which the highest need not be the choice: a recipe can
fail its proof, or be no faster in the confirmation than a simpler one. Here a trial is complete
where its value decided: the chosen recipe, and the baseline where that is slower. What cannot be
chosen is infeasible and has the worst value, 0; what the search set aside is pruned, its rate the
intermediate value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoprec.core.profile import Profile
from autoprec.core.recipe import plain_recipe
from autoprec.core.speed.space import point_key
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.stage_results import TuningResult
from autoprec.tuning.study.study import Study, distributions_of


def write_final_study(study: Study, result: TuningResult, profile: Profile) -> None:
    """Write the study of a finished tuning beside the search's, replacing an earlier one."""
    space, evidence = result.trials.space, profile.evidence
    chosen = dict(space.point(result.confirmation.choice.recipe))
    baseline = dict(result.search.baseline_point)
    kinds = distributions_of(space.levels())
    trials = []
    for outcome in {point_key(o.point): o for o in result.trials.history}.values():
        point, refused = dict(outcome.point), _why_refused(outcome, profile)
        how: dict[str, Any] = {"params": point, "distributions": kinds}
        if point == chosen:
            rate = evidence.chosen.samples_per_second
            trials.append(_trial("chosen", rate, plain_recipe(profile.recipe), **how))
        elif refused:
            trials.append(_trial("infeasible", 0.0, {"reason": refused}, **how))
        elif point == baseline and _slower(profile):
            trials.append(_trial("baseline", evidence.baseline.samples_per_second, {}, **how))
        else:
            trials.append(_trial("set aside", outcome.rate, {}, **how))
    study.write_final(trials, evidence.reason)


def _trial(fate: str, value: float, attributes: Mapping[str, object], **how: Any) -> Any:
    """Return a trial of Optuna's: what became of a recipe, its rate, and what else there is."""
    from optuna.trial import TrialState, create_trial

    aside = fate == "set aside"
    return create_trial(
        state=TrialState.PRUNED if aside else TrialState.COMPLETE,
        value=None if aside else value,
        intermediate_values={0: value} if aside else {},
        user_attrs={"fate": fate, **attributes},
        constraints={"feasible": float(fate == "infeasible")},
        **how,
    )


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
