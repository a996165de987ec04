"""Compares the confirmation's rounds with the search: results that contradict are not believed."""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.core.number_words import times
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.consistency import RecipeRates, contradict, find_inconsistencies
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.selection import Finalist
from autoprec.tuning.stage_results import SearchResult
from autoprec.tuning.trials import Trials


def searched_ratio(trials: Trials, recipe: Recipe, baseline: Recipe) -> Ratio | None:
    """Return the speedup over the baseline that the search saw; None where it saw none."""
    one, other = trials.outcome_of(recipe), trials.outcome_of(baseline)
    if one is None or other is None or one.measurement is None or other.measurement is None:
        return None
    if one.rate <= 0 or other.rate <= 0:
        return None
    ratio = one.rate / other.rate
    own, base = one.measurement, other.measurement
    low = own.step_seconds / own.high * base.low / base.step_seconds
    high = own.step_seconds / own.low * base.high / base.step_seconds
    return Ratio(ratio, ratio * low, ratio * high, 1)


def is_far_slower(trials: Trials, recipe: Recipe, other: Recipe) -> bool:
    """Return whether a recipe was slower than another by more than a disturbance explains."""
    searched = searched_ratio(trials, other, recipe)
    return searched is not None and searched.ratio > SPEED.out_of_line_factor


def inconsistencies(trials: Trials, baseline: Finalist, best: Finalist | None) -> str:
    """Say why the final rounds cannot be believed, "" where they can; `best` may be chosen."""
    if trials.rehearsed:
        return ""
    if best is None:
        return "; ".join(find_inconsistencies(None, None, [_rates(trials, baseline)]))
    ratio = paired_ratio(best.rates, baseline.rates)
    searched = searched_ratio(trials, best.recipe, baseline.recipe)
    both = [_rates(trials, each) for each in (baseline, best)]
    return "; ".join(find_inconsistencies(ratio, searched, both))


def lost_without_reason(trials: Trials, raced: Sequence[Finalist]) -> str:
    """Name a recipe that led the search by far and lost the race; "" if there is none.

    `raced` begins with the baseline. What slowed one of the two lasted, and nothing tells which.
    """
    baseline = raced[0]
    for rival in raced[1:] if not trials.rehearsed else ():
        searched = searched_ratio(trials, rival.recipe, baseline.recipe)
        ratio = paired_ratio(rival.rates, baseline.rates[: len(rival.rates)])
        if searched is not None and ratio.high < 1.0 < searched.low and contradict(ratio, searched):
            name = describe_recipe(rival.recipe)
            return (
                f"{name} ran at {times(searched.ratio)} the speed of the baseline in the search "
                f"and at {ratio.in_words()} in the comparison"
            )
    return ""


def untried_policies(search: SearchResult) -> str:
    """Say that a limit left time for the baseline's policy alone; "" if another one ran."""
    trials, own = search.trials, search.baseline.policy
    others = [policy.value for policy in trials.space.policies if policy is not own]
    ran = any(search.of_policy(policy) for policy in others)
    if ran or not others or not search.not_covered or trials.rehearsed:
        return ""
    return f"a limit ended the search before it tried {' or '.join(others)}"


def far_slower_rival(trials: Trials, baseline: Recipe) -> Recipe | None:
    """Return the best other recipe where it measured an order of magnitude below the baseline."""
    own = trials.outcome_of(baseline)
    others = (outcome for outcome in trials.history if outcome is not own)
    best = max(others, key=lambda outcome: outcome.rate, default=None)
    if own is None or best is None or trials.rehearsed:
        return None
    slower = 0 < best.rate * SPEED.rate_change_factor < own.rate
    return trials.space.recipe(best.point) if slower else None


def why_baseline(trials: Trials, baseline: Recipe) -> str:
    """Say why the baseline is the answer where no other recipe is left to be confirmed."""
    own = trials.outcome_of(baseline)
    best = max((outcome.rate for outcome in trials.history if outcome is not own), default=0.0)
    if not best:
        return "nothing else was measured"
    passed = " that passed" if own is not None and best > own.rate else ""
    return f"the baseline is the fastest recipe{passed}"


def _rates(trials: Trials, finalist: Finalist) -> RecipeRates:
    trial = trials.outcome_of(finalist.recipe)
    measured = None if trial is None else trial.measurement
    before = 0.0 if measured is None else measured.samples_per_second
    return RecipeRates(describe_recipe(finalist.recipe), before, finalist.rates)
