"""Compares the confirmation's rounds with the search: results that contradict are not believed."""

from __future__ import annotations

from autoprec.core.recipe import Recipe
from autoprec.core.speed.attribution import describe_recipe
from autoprec.core.speed.consistency import RATE_CHANGE_FACTOR, RecipeRates, find_inconsistencies
from autoprec.core.speed.selection import Finalist
from autoprec.core.speed.space import point_key
from autoprec.core.speed.trial_results import Outcome
from autoprec.core.statistics import Ratio, paired_ratio
from autoprec.tuning.profile_builder import Findings


def searched_ratio(findings: Findings, recipe: Recipe, plain: Recipe) -> Ratio | None:
    """Return the speedup over the baseline that the search saw; None where it saw none."""
    one, other = _trial(findings, recipe), _trial(findings, plain)
    if one is None or other is None or one.measurement is None or other.measurement is None:
        return None
    if one.rate <= 0 or other.rate <= 0:
        return None
    ratio = one.rate / other.rate
    own, base = one.measurement, other.measurement
    low = own.step_seconds / own.high * base.low / base.step_seconds
    high = own.step_seconds / own.low * base.high / base.step_seconds
    return Ratio(ratio, ratio * low, ratio * high, 1)


def doubts_of(findings: Findings, baseline: Finalist, best: Finalist | None) -> str:
    """Say why the final rounds cannot be believed, "" where they can; `best` may be chosen."""
    if findings.rehearsed:
        return ""
    if best is None:
        return "; ".join(find_inconsistencies(None, None, [_pace(findings, baseline)]))
    ratio = paired_ratio(best.rates, baseline.rates)
    searched = searched_ratio(findings, best.recipe, baseline.recipe)
    return "; ".join(
        find_inconsistencies(ratio, searched, [_pace(findings, f) for f in (baseline, best)])
    )


def far_behind(findings: Findings, plain: Recipe) -> Recipe | None:
    """Return the best other recipe where it measured an order of magnitude below the baseline."""
    own = _trial(findings, plain)
    rest = max((o for o in findings.history if o is not own), key=lambda o: o.rate, default=None)
    if own is None or rest is None or findings.rehearsed:
        return None
    return (
        findings.space.recipe(rest.point) if 0 < rest.rate * RATE_CHANGE_FACTOR < own.rate else None
    )


def why_plain(findings: Findings, plain: Recipe) -> str:
    """Say why the baseline is the answer where no other recipe is left to be confirmed."""
    own = _trial(findings, plain)
    rest = max((o.rate for o in findings.history if o is not own), default=0.0)
    if not rest:
        return "nothing else was measured"
    passed = " that passed" if own is not None and rest > own.rate else ""
    return f"the baseline is the fastest recipe{passed}"


def _pace(findings: Findings, final: Finalist) -> RecipeRates:
    trial = _trial(findings, final.recipe)
    measured = None if trial is None else trial.measurement
    before = 0.0 if measured is None else measured.samples_per_second
    return RecipeRates(describe_recipe(final.recipe), before, final.rates)


def _trial(findings: Findings, recipe: Recipe) -> Outcome | None:
    """Return the search's trial of a recipe; None where islands were added to it afterwards."""
    space = findings.space
    point = space.point(recipe)
    if space.recipe(point).float32_modules != recipe.float32_modules:
        return None
    return next((o for o in findings.history if point_key(o.point) == point_key(point)), None)
