"""The sentence that ends a tuning: how much faster than what, and why."""

from __future__ import annotations

from autoprec.core.device.roofline import known_limit
from autoprec.core.dtypes import Policy
from autoprec.core.number_words import percent, plain_number, rate_number, times
from autoprec.core.numerics.verdict import HOW_TO_SEE_LEARNING, Verdict
from autoprec.core.profile import BatchChoice, Chosen, Profile
from autoprec.core.profile.fit import lacked_time
from autoprec.core.recipe import FLOAT8
from autoprec.core.speed.attribution import PRECISION, describe_parts, switch_off_in_turn
from autoprec.core.speed.noise import is_faster
from autoprec.reporting.flags import with_flags
from autoprec.reporting.text import seconds_text

#: A smaller share of the memory bandwidth bounds nothing and is not mentioned.
_NOTABLE_BANDWIDTH_SHARE = 0.01

#: Names of limits as they read in a sentence, if that differs.
_LIMITS = {"data pipeline": "the data pipeline", "launches": "the launching of its kernels"}


def closing_sentence(profile: Profile) -> str:
    """Return one sentence with the result and its numbers."""
    recipe, evidence = profile.recipe, profile.evidence
    if profile.device.fingerprint.rehearsal:
        return f"result: {profile.describe_recipe()}: {evidence.reason}"
    if lacked_time(evidence):
        return (
            f"{evidence.reason}. Run the same command with a longer --time-limit or more --trials: "
            "it goes on with those that ran"
        )
    if evidence.inconclusive:
        return (
            f"{evidence.reason}. Run the same command with --fresh when this machine is idle; "
            "without --fresh it returns this result again"
        )
    if recipe.policy is Policy.FLOAT32 and evidence.over_baseline.rounds == 0:
        return f"result: {with_flags(evidence.reason)}{_left_out(profile)}"
    text = f"result: {headline(profile)}"
    text += _loss_text(evidence.parity)
    share = evidence.chosen.peak_share
    if share is not None:
        computed = recipe.policy.compute_dtype_with(evidence.baseline.weights_in)
        text += f"; {share:.0%} of this device's measured {computed} peak"
    share = evidence.chosen.memory_share
    if share is not None and share >= _NOTABLE_BANDWIDTH_SHARE:
        text += f"; at least {share:.0%} of its memory bandwidth"
    if evidence.chosen.bound:
        text += f"; {_limit(evidence.chosen)}"
    if evidence.chosen.break_even_steps is not None:
        text += (
            f"; compilation takes {seconds_text(evidence.chosen.warmup_seconds)} and pays off "
            f"after {evidence.chosen.break_even_steps:,} steps"
        )
    if evidence.parity.caveat:
        text += with_flags(f". Warning: {evidence.parity.caveat}; {HOW_TO_SEE_LEARNING}")
    return text + _left_out(profile)


def _left_out(profile: Profile) -> str:
    """Say what a limit left out where float32 is the answer; without it another one might be."""
    missing = profile.evidence.not_covered
    if not missing or profile.recipe.policy is not Policy.FLOAT32:
        return ""
    return (
        f". A limit left out: {'; '.join(missing)}. Run the same command with a longer one "
        "(--time-limit, --trials): it goes on with the trials that ran"
    )


def _limit(chosen: Chosen) -> str:
    """Say what limits the step, beside the shares that are told already."""
    limit = known_limit(chosen.bound, chosen.peak_share, chosen.memory_share)
    if limit is not None:
        return f"a step is limited by {_LIMITS.get(limit, limit)}"
    known = [each is not None for each in (chosen.peak_share, chosen.memory_share)]
    if not any(known):
        return "what limits a step is not known"
    return f"{'neither explains' if all(known) else 'that does not explain'} the time of a step"


def _loss_text(parity: Verdict) -> str:
    """Say how near the loss was at the same weights, and of what that is a share."""
    if parity.loss_deviation is None:
        return ""
    above = f", of what is above {plain_number(parity.loss_origin)}" if parity.loss_origin else ""
    return f"; loss within {percent(parity.loss_deviation)} at the same weights{above}"


def headline(profile: Profile) -> str:
    """Summarize the recipe, its speed-up over float32 at the same batch, and the batch's own.

    What is easily overlooked comes first: a recipe slower than float32, a loader that is slower
    than the step, or a gain that is not due to precision.
    """
    recipe, evidence = profile.recipe, profile.evidence
    name, gain = profile.describe_recipe(), evidence.over_baseline
    if gain.ratio < 1.0 and recipe.forced:
        slower = f"{gain.in_words()}: slower than {profile.describe_baseline()}"
        return f"{slower}; only {name} was requested"
    text = f"{_loader_limit(profile)}{_caveat(profile)}{name}: {profile.describe_gains()}"
    if len(evidence.waterfall) > 1:
        return f"{text} = {describe_parts(evidence.waterfall)}"
    if evidence.waterfall and len(switch_off_in_turn(recipe, profile.baseline)) > 1:
        text += f"; {evidence.waterfall[0].what} together (--attribute times each)"
    return text


def _loader_limit(profile: Profile) -> str:
    """Say that the loader is slower than the step; empty if it is not."""
    chosen = profile.evidence.chosen
    if chosen.data_seconds <= chosen.step_seconds:
        return ""
    share = chosen.step_seconds / chosen.data_seconds
    return (
        f"the loader feeds {rate_number(chosen.samples_per_second * share)} samples/s and a step "
        f"could train {rate_number(chosen.samples_per_second)}: more loader workers come first; "
    )


def _caveat(profile: Profile) -> str:
    """Say that the gain is not due to precision; empty if it is."""
    if profile.recipe.policy is Policy.FLOAT32:  # the others were slower, refused, or not proven
        within = " in the time there was" if profile.evidence.not_covered else ""
        return f"no lower precision was both faster and passed its check{within}; "
    waterfall = profile.evidence.waterfall
    own = [part.speedup for part in waterfall if part.what in (FLOAT8, PRECISION)]
    return "" if not own or any(map(is_faster, own)) else "lower precision brings no gain here; "


def further_lines(profile: Profile) -> list[str]:
    """Return the lines below the closing sentence: the gain's parts, the batch, the ranks."""
    return [*part_lines(profile), *filter(None, (batch_line(profile), communication_line(profile)))]


def part_lines(profile: Profile) -> list[str]:
    """List each part of the gain with its interval and both sides; nothing if there is only one."""
    evidence = profile.evidence
    if len(evidence.waterfall) < 2 or evidence.inconclusive:
        return []
    lines, side = [], profile.describe_recipe()
    for part in evidence.waterfall:
        lines.append(f"  {part.what}: {part.speedup.in_words()}: {side} over {part.against}")
        side = part.against
    return lines


def batch_line(profile: Profile) -> str:
    """Say what is known of the batch beside the recipe; empty if nothing was to be chosen."""
    batch = profile.evidence.batch
    if batch is None or batch.knee is None or profile.evidence.inconclusive:
        return ""
    chosen = f"{batch.chosen} (--batch {batch.rule})" if batch.rule != "knee" else batch.chosen
    text = f"  the batch: {chosen} chosen, knee {batch.knee}, {batch.fits} fits"
    if batch.loader_feeds is not None:
        text += f"; the loader feeds {rate_number(batch.loader_feeds)} samples/s"
    return f"{text}{_noise_text(batch)}"


def _noise_text(batch: BatchChoice) -> str:
    """Say what a larger batch needs at most, by the gradient's noise; empty if that is unknown.

    The learning rates are those of Goyal et al. (arXiv 1706.02677) for SGD, and of Malladi et al.
    (arXiv 2205.10287) for Adam.
    """
    seen, yours, chosen = batch.noise_scale, batch.yours, batch.chosen
    if seen is None:
        return ""
    at = "more than can be told" if seen.at is None else rate_number(seen.at)
    text = f"; gradient noise scale {at} samples in steps {seen.first_step}-{seen.last_step}"
    more = seen.samples_needed(chosen, yours)
    if chosen <= yours or more is None:
        return text
    linear = chosen / yours
    return (
        f"{text}: {chosen} needs at most {times(more)} the samples of {yours} for the same loss, "
        f"with the learning rate times {plain_number(linear)} (SGD) or "
        f"{plain_number(linear**0.5)} (Adam)"
    )


def communication_line(profile: Profile) -> str:
    """Say what share of a step waits for other ranks; empty if that was not measured."""
    evidence = profile.evidence
    before, now = evidence.baseline.exposed_communication, evidence.chosen.exposed_communication
    if now is None or evidence.inconclusive:
        return ""
    text = f"  waiting for other ranks: {now.as_share()} of a step"
    return f"{text}, {before.as_share()} in the baseline" if before and before != now else text
