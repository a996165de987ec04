"""The first answer of a tuning: what the search found, before it is raced and proven."""

from __future__ import annotations

from collections.abc import Collection

from autoprec.core.dtypes import Policy
from autoprec.core.number_words import about_times
from autoprec.core.recipe_words import describe_batch_of, describe_recipe
from autoprec.core.speed.space import point_key
from autoprec.core.speed.trial_results import shortlist
from autoprec.tuning.stage_results import SearchResult


def first_answer(search: SearchResult, policies: Collection[Policy] = ()) -> str:
    """Say which recipe leads after the search, and about how fast it is.

    Only `policies` may be chosen, any where there are none.
    """
    trials, baseline = search.trials, search.baseline_outcome
    found = search.ranking or trials.history
    allowed = [o for o in found if not policies or o.point["policy"] in policies]
    leading = shortlist(allowed, trials.space, count=1)
    if not leading:
        return "so far: none of the policies that were asked for has run"
    leader, recipe = leading[0], trials.space.recipe(leading[0].point)
    name = describe_recipe(recipe, trials.task.weights_in)
    if trials.rehearsed:
        return f"so far: {name}; how fast that is cannot be said of a pretended device"
    alike = point_key({**leader.point, "policy": Policy.FLOAT32.value})
    plain = next((o.rate for o in trials.history if point_key(o.point) == alike), 0.0)
    said = []
    if plain and plain != leader.rate:
        said.append(f"about {about_times(leader.rate / plain)} as fast as float32 like it")
    if recipe.effective_batch != search.baseline.effective_batch or not plain:
        ratio = about_times(leader.rate / baseline.rate)
        said.append(f"about {ratio} the samples/s of {describe_batch_of(search.baseline)}")
    how_fast = " and ".join(said) or f"the fastest of {len(trials.history)} tried"
    return f"so far: {name}, {how_fast}, by a short timing; neither raced nor proven yet"
