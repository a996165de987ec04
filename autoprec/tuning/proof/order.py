"""Which recipes are worth a check against float32, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autoprec.core.device.policies import Refusal
from autoprec.core.dtypes import Policy
from autoprec.core.number_words import times
from autoprec.core.numerics.reference_recipe import (
    is_exact,
    is_reference,
    keeps_arithmetic,
    settings_of,
)
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import name_recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.float16 import float16_waits
from autoprec.core.speed.space import BATCH, Space
from autoprec.core.speed.trial_results import Outcome, Status, shortlist
from autoprec.errors import NoFeasibleRecipe
from autoprec.tuning.job import TuningJob
from autoprec.tuning.proof.duration import check_seconds
from autoprec.tuning.proof.prover import Prover
from autoprec.tuning.stage_results import FinalistLost, PreflightResult, ProofResult, SearchResult
from autoprec.tuning.time_limit import CONFIRMATION_SHARE, PROOF_SHARE

_SPARED = (
    f"not tried: it is not known to be faster here than {Policy.MIXED_BFLOAT16}, which was tried "
    "(--policies float32,mixed_bfloat16,mixed_float16 tries both)"
)


def run_proofs(
    job: TuningJob,
    preflight: PreflightResult,
    search: SearchResult,
    prover: Prover,
) -> ProofResult:
    """Prove the fastest recipe of a policy, the fastest policy first, until one passes.

    A proof costs as much as the search, so nothing slower than what passed is proven. Raises
    `NoFeasibleRecipe` where nothing passes.
    """
    result = ProofResult()
    allowed = job.options.policies or preflight.space.policies
    for policy in sorted(preflight.space.policies, key=lambda each: -_best_rate(search, each)):
        if policy in allowed:
            result = _prove_policy(job, policy, search, prover, result)
    if not result.proven:
        refusals = (*preflight.refusals, *search.refusals, *result.refusals)
        reasons = "; ".join(f"{each.candidate}: {each.reason}" for each in refusals)
        if not any(search.of_policy(each.value) for each in allowed):
            raise NoFeasibleRecipe(
                f"no policy that was asked for was tried ({reasons}). Allow more `trials`, or a "
                "longer `time_limit`"
            )
        raise NoFeasibleRecipe(
            f"no policy that was asked for passes ({reasons}). Add float32 to `policies`, or "
            "accept what trains differently with `accept_drift`"
        )
    prover.forget()
    return result


def replace_finalist(
    proof: ProofResult, lost: FinalistLost, search: SearchResult, prover: Prover
) -> ProofResult:
    """Prove the fastest recipe of the same policy at a smaller batch than the finalist lost."""
    result = proof.without(lost.recipe, lost.reason)
    smaller = [
        outcome
        for outcome in search.of_policy(lost.recipe.policy.value)
        if int(outcome.point[BATCH]) < lost.recipe.batch_size
    ]
    proved, _ = _prove_all(shortlist(smaller, search.trials.space, count=1), prover, result)
    prover.forget()
    known = {each.recipe.key() for each in result.proven}
    new = [each for each in proved.proven if each.recipe.key() not in known]
    return replace(proved, proven=(*result.proven, *new))


def _prove_policy(
    job: TuningJob, policy: Policy, search: SearchResult, prover: Prover, result: ProofResult
) -> ProofResult:
    """Prove the fastest recipes of one policy; add them, or why there are none, to the result."""
    space, own = search.trials.space, search.of_policy(policy.value)
    best = shortlist(own, space, count=1)
    if not best:
        waits = policy is Policy.MIXED_FLOAT16 and _waits(search)
        spared = waits and not is_float16_next(search, result)
        return _refused(result, policy, _SPARED if spared else _why_none_measured(own))
    floor = _best_rate(search, Policy.FLOAT32) if job.float32_allowed else 0.0
    if policy is not Policy.FLOAT32 and best[0].rate < floor:
        return _refused(result, policy, _why_too_slow(search, best[0], own))
    floor = max((each.rate for each in result.proven), default=0.0)
    left = job.deadline.left(PROOF_SHARE)
    if left <= 0 or not any(_ends_in_time(each, search, 0.5, left) for each in own):
        return _without_time(job, policy, search, floor, prover, result)
    timely, result = _provable_in_time(job, search, own, result)
    leading = [each for each in shortlist(timely, space, count=1) if each.rate >= floor]
    fast = [each for each in timely if each.rate >= floor]

    def in_time(outcome: Outcome) -> bool:
        return _ends_in_time(outcome, search, 0.5, job.deadline.left(PROOF_SHARE))

    return _prove_first_healthy(leading, fast, space, prover, result, in_time)


def _prove_first_healthy(
    leading: Sequence[Outcome],
    others: Sequence[Outcome],
    space: Space,
    prover: Prover,
    result: ProofResult,
    in_time: Callable[[Outcome], bool] = lambda outcome: True,
) -> ProofResult:
    """Prove the leading recipes; where none passes, go on with the fastest of the simpler ones.

    Those are the ones without the settings that were found to compute something else; where none
    was, the policy by itself, for the compiler or a rounding may have broken it; and plain float32.
    """
    tried = list(leading)
    proved, guilty = _prove_all(leading, prover, result)
    found = set(guilty)
    while len(proved.proven) == len(result.proven):
        rest = [o for o in others if not _settings(o, space) & found and in_time(o)]
        simple = [each for each in rest if keeps_arithmetic(space.recipe(each.point))]
        plain = [each for each in simple if is_reference(space.recipe(each.point))]
        following = [
            each
            for group in (rest if guilty else simple, plain)
            for each in shortlist(group, space, count=1)
            if each not in tried
        ]
        if not following:
            return proved
        tried.append(following[0])
        proved, guilty = _prove_all(following[:1], prover, proved)
        found |= guilty
    return proved


def _settings(outcome: Outcome, space: Space) -> set[str]:
    """Return the settings of a trial's recipe, by field or knob."""
    return {setting.key for setting in settings_of(space.recipe(outcome.point))}


def _ends_in_time(outcome: Outcome, search: SearchResult, share: float, left: float) -> bool:
    """Return whether the check of a recipe ends in so many seconds, by this share of its steps."""
    history, trials = search.ranking or search.trials.history, search.trials
    evaluated = trials.task.has_evaluate
    needed = check_seconds(outcome, history, trials.space, share=share, evaluated=evaluated)
    return not needed or needed <= left


def _provable_in_time(
    job: TuningJob, search: SearchResult, own: Sequence[Outcome], result: ProofResult
) -> tuple[Sequence[Outcome], ProofResult]:
    """Leave out the batches whose check would not end within the time limit.

    A check that cannot train is none, and a smaller batch that passed beats that. Where no recipe
    that may beat float32 would remain, those stay that may end, for half of the steps expected are
    a margin. Returns the outcomes to choose from, and the result with what was left out.
    """
    left, space = job.deadline.left(PROOF_SHARE), search.trials.space
    fastest, least = shortlist(own, space, count=1), _best_rate(search, Policy.FLOAT32)
    for share in (1.0, 0.5):
        timely = [each for each in own if _ends_in_time(each, search, share, left)]
        kept = shortlist(timely, space, count=1)
        if kept and kept[0].rate >= SPEED.may_be_fastest_share * least:
            break
    if kept == fastest:
        return timely, result
    left_out = f"the check of {name_recipe(space.recipe(fastest[0].point))}, which is faster"
    return timely, replace(result, not_covered=(*result.not_covered, left_out))


def _without_time(
    job: TuningJob,
    policy: Policy,
    search: SearchResult,
    floor: float,
    prover: Prover,
    result: ProofResult,
) -> ProofResult:
    """Take of a policy what needs no training: recipes that compute what float32 does.

    Comparing their settings at the same weights has to end within the time limit.
    """
    space, own = search.trials.space, search.of_policy(policy.value)
    left = job.deadline.left(CONFIRMATION_SHARE)
    free = [
        each
        for each in own
        if is_exact(space.recipe(each.point)) and _ends_in_time(each, search, 1.0, left)
    ]
    fastest, needs_none = shortlist(own, space, count=1), shortlist(free, space, count=1)
    if fastest != needs_none:
        left_out = f"the check of {policy}" + ("'s fastest recipe" if needs_none else "")
        result = replace(result, not_covered=(*result.not_covered, left_out))
    if not needs_none:
        return _refused(result, policy, "no time was left to check it")
    free = [each for each in free if each.rate >= floor]
    return _prove_first_healthy(shortlist(free, space, count=1), free, space, prover, result)


def _prove_all(
    outcomes: Sequence[Outcome], prover: Prover, result: ProofResult
) -> tuple[ProofResult, set[str]]:
    """Prove recipes one after the other; return the result, and the settings that were refused."""
    guilty: set[str] = set()
    for outcome in outcomes:
        attempt = prover.prove(outcome)
        proven = () if attempt.proven is None else (attempt.proven,)
        refusals = () if attempt.refusal is None else (attempt.refusal,)
        left_out = (attempt.left_out,) if attempt.left_out else ()
        result = replace(
            result,
            proven=(*result.proven, *proven),
            refusals=(*result.refusals, *refusals),
            not_covered=(*result.not_covered, *left_out),
            seconds=result.seconds + attempt.seconds,
        )
        guilty |= set(attempt.guilty)
    return result, guilty


def is_float16_next(search: SearchResult, proof: ProofResult, chosen: Recipe | None = None) -> bool:
    """Say whether float16 has waited in vain: bfloat16 was refused, or gains nothing.

    What it needs in float32 has to leave it a gain that is sure, and that the final rounds, if they
    have `chosen`, did not find to be none. Where another policy passed that is faster than
    bfloat16, float16 would not be chosen either.
    """
    bfloat16 = Policy.MIXED_BFLOAT16
    passed = [each for each in proof.proven if each.recipe.policy is bfloat16]
    own = [
        each.rate / (1.0 + SPEED.search_ratio_error * bool(each.recipe.float32_modules))
        for each in passed
    ]
    refused = any(each.candidate == bfloat16.value for each in proof.refusals)
    fails = max(own) <= _best_rate(search, Policy.FLOAT32) if own else refused
    gained_nothing = chosen is not None and chosen.policy is Policy.FLOAT32
    fails = fails or (gained_nothing and any(each.recipe.float32_modules for each in passed))
    return _waits(search) and fails


def _waits(search: SearchResult) -> bool:
    return float16_waits(search.trials.space, search.trials.history)


def _refused(result: ProofResult, policy: Policy, reason: str) -> ProofResult:
    return replace(result, refusals=(*result.refusals, Refusal(policy.value, reason)))


def _best_rate(search: SearchResult, policy: Policy) -> float:
    return max((outcome.rate for outcome in search.of_policy(policy.value)), default=0.0)


def _why_too_slow(search: SearchResult, best: Outcome, own: Sequence[Outcome]) -> str:
    """Say how slow a policy's fastest recipe is beside float32's, and what was not tried of it.

    Of a model that computes in 16 bits by itself, it is the model's own that this is compared with.
    """
    plain = Policy.FLOAT32.name_with(search.trials.task.weights_in)
    float32 = max(search.of_policy(Policy.FLOAT32.value), key=lambda outcome: outcome.rate)
    share = f"{times(best.rate / float32.rate)} the speed of"
    measured = "slower than" if search.trials.rehearsed else share
    reason = f"measured {measured} the best {plain} recipe"
    largest, batch = max(int(each.point[BATCH]) for each in own), int(float32.point[BATCH])
    if largest < batch:
        reason += f", which has batch {batch}; it was not tried at a batch above {largest}"
    return reason


def _why_none_measured(own: Sequence[Outcome]) -> str:
    failed = [outcome for outcome in own if outcome.status is not Status.OK]
    if not failed:
        return "the search ended before it was tried"
    return f"{failed[0].status}: {failed[0].reason}"
