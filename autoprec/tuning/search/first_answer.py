"""The first answer of a tuning: what the search found, before it is raced and proven."""

from __future__ import annotations

from autoprec.core.dtypes import Policy
from autoprec.core.number_words import about_times
from autoprec.core.recipe_words import describe_batch_of, describe_recipe
from autoprec.core.speed.space import point_key
from autoprec.core.speed.trial_results import shortlist
from autoprec.tuning.stage_results import SearchResult


def first_answer(search: SearchResult) -> str:
    """Say which recipe leads after the search, and about how fast it is; empty for float32."""
    trials, baseline = search.trials, search.baseline_outcome
    found = shortlist(search.ranking or trials.history, trials.space, count=1)
    if trials.rehearsed or not found or found[0].point["policy"] == Policy.FLOAT32.value:
        return ""
    leader, weights = found[0], trials.task.weights_in
    recipe = trials.space.recipe(leader.point)
    alike = point_key({**leader.point, "policy": Policy.FLOAT32.value})
    plain = next((o.rate for o in trials.history if point_key(o.point) == alike), 0.0)
    said = [f"about {about_times(leader.rate / plain)} as fast as float32 like it"] if plain else []
    if recipe.effective_batch != search.baseline.effective_batch or not plain:
        ratio = about_times(leader.rate / baseline.rate)
        said.append(f"about {ratio} the samples/s of {describe_batch_of(search.baseline)}")
    return (
        f"so far: {describe_recipe(recipe, weights)}, {' and '.join(said)}, by a short timing; "
        "neither raced nor proven yet"
    )
