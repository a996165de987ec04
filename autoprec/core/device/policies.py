"""Derives the policies worth trying from what is known of a device, in order, with reasons.

A policy without objections is a candidate; its objections are the refusal's reason. The decision,
the table's "why" and the profile's refusals all read the same values. Nothing here knows a device
by name: it reads `DeviceFacts` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoprec.core.device.facts import DeviceFacts, Evidence
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import DType, Policy
from autoprec.core.number_words import about_times

#: Peaks nearer than this count as equal; the simpler policy then goes first.
_SAME_SPEED_RATIO = 1.1

_WHOLE_MODEL_NOTE = "a whole model gains less"

_WAITS = (
    f"not known to be faster than {Policy.MIXED_BFLOAT16}: tried only where that fails or is "
    "slower than float32"
)

_SIMPLEST_FIRST = (Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16, Policy.TF32)


@dataclass(frozen=True)
class Candidate:
    """A policy worth a trial, and why."""

    policy: Policy
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """Something that was ruled out, and why."""

    candidate: str
    reason: str


@dataclass(frozen=True)
class Proposal:
    """What the hardware makes plausible: candidates best first, refusals, and what to expect.

    `recommended` is the first candidate's policy.
    """

    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]
    expectation: str
    recommended: Policy = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "recommended", self.candidates[0].policy)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Return the candidates' policies, best first."""
        return tuple(candidate.policy for candidate in self.candidates)


def propose(facts: DeviceFacts, requested: tuple[Policy, ...] = ()) -> Proposal:
    """Rank the policies that this device makes plausible; `requested` overrides the refusals.

    Without `requested`, float32 is always a candidate. With it, exactly the requested policies are
    candidates, and none is refused: those the rules would have ranked first, then those they would
    have refused.
    """
    accepted, refused = _rank_and_refuse(facts)
    expectation = _describe_expectation(facts, accepted)
    if not requested:
        if float16_waits(facts):
            accepted = tuple(
                replace(c, reasons=(*c.reasons, _WAITS)) if c.policy is Policy.MIXED_FLOAT16 else c
                for c in accepted
            )
        refusals = tuple(Refusal(p.value, "; ".join(why)) for p, why in refused.items())
        return Proposal(accepted, refusals, expectation)
    chosen = [
        Candidate(c.policy, ("requested", *c.reasons)) for c in accepted if c.policy in requested
    ]
    chosen += [
        Candidate(policy, ("requested", f"the rules refuse it: {'; '.join(why)}"))
        for policy, why in refused.items()
        if policy in requested
    ]
    return Proposal(tuple(chosen), (), expectation)


def float16_waits(facts: DeviceFacts) -> bool:
    """Return whether float16 is worth trials only after bfloat16: that is native and as fast."""
    both = (Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16)
    if any(objections(facts, policy) for policy in both) or _may_be_slow(facts, both[0]):
        return False
    speeds = _speeds(facts, both)
    faster = speeds.get(both[1], 0.0) > _SAME_SPEED_RATIO * speeds.get(both[0], 0.0)
    return facts.fact(DType.BFLOAT16).support is Support.NATIVE and not faster


def measured_choice(facts: DeviceFacts) -> Candidate:
    """Return the policy for a device without a profile: a faster one only if it was measured so.

    What was measured here counts, else what was measured on another device of the family. Without
    either it is float32, whatever the catalogue promises: what it calls native may be slow here.
    """
    accepted, _ = _rank_and_refuse(facts)
    for candidate in accepted:
        dtype = candidate.policy.compute_dtype
        if candidate.policy is Policy.FLOAT32:
            break
        here, family = facts.measured_ratio(dtype), facts.fact(dtype).family_ratio
        ratio, where = (family, f"another {facts.title}") if here is None else (here, "this device")
        if ratio is not None and ratio >= _SAME_SPEED_RATIO:
            if here is not None and facts.measured_on:
                where += f", on {facts.measured_on}"
            why = f"{dtype} products were measured at {about_times(ratio)} float32's ({where})"
            return Candidate(candidate.policy, (why,))
    why = "nothing that was measured says that another policy would be faster here"
    return Candidate(Policy.FLOAT32, (why,))


def _rank_and_refuse(
    facts: DeviceFacts,
) -> tuple[tuple[Candidate, ...], dict[Policy, tuple[str, ...]]]:
    refused = {p: why for p in Policy if (why := objections(facts, p))}
    known = [p for p in Policy if p not in refused and p is not Policy.FLOAT32]
    fast = [
        p
        for p in known
        if facts.fact(p.compute_dtype).support is Support.NATIVE and not _may_be_slow(facts, p)
    ]
    unsure = [p for p in known if p not in fast]
    order = [*_ranked(facts, fast), Policy.FLOAT32, *unsure]
    return tuple(Candidate(p, _reasons(facts, p)) for p in order), refused


def objections(facts: DeviceFacts, policy: Policy) -> tuple[str, ...]:
    """Return why `policy` should not be tried on this device; empty means that it may."""
    if policy is Policy.FLOAT32:
        return ()
    dtype = policy.compute_dtype
    fact = facts.fact(dtype)
    ratio, ratios = facts.measured_ratio(dtype), facts.measured_range(dtype)
    if fact.support is Support.ABSENT:
        return (_join_claim(f"{dtype} is absent", fact.reason),)
    if ratio is not None and ratios is not None and ratios[1] < 1.0:
        return (
            f"{dtype} products are slower than float32's (measured: {about_times(ratio)} float32)",
        )
    on_cpu = facts.kind is DeviceKind.CPU
    if on_cpu and ratio is not None and ratios is not None:
        if ratios[1] >= _SAME_SPEED_RATIO:  # the timings decide, whatever the catalogue says
            return ()
        shown = f"measured: {about_times(ratio)} float32"
        return (f"{dtype} products are no faster than float32's ({shown})",)
    was_faster = (fact.earlier_ratio or 0.0) >= _SAME_SPEED_RATIO
    if fact.support in (Support.EMULATED, Support.SLOW) and not was_faster:
        return (_join_claim(f"{dtype} is {fact.support}", fact.reason),)
    return _objections_on_cpu(facts, dtype) if on_cpu else ()


def _may_be_slow(facts: DeviceFacts, policy: Policy) -> bool:
    """Return whether a policy's products were timed too slow, but by too little to refuse it."""
    ratio = facts.measured_ratio(policy.compute_dtype)
    least = _SAME_SPEED_RATIO if facts.kind is DeviceKind.CPU else 1.0
    return ratio is not None and ratio < least


def _objections_on_cpu(facts: DeviceFacts, dtype: DType) -> tuple[str, ...]:
    """Object to what CPU libraries do not reliably run fast, until a measurement says otherwise."""
    if facts.fact(dtype).support is Support.UNKNOWN:
        claim = (
            f"nothing is known of {dtype} on this CPU; emulated, it can be a hundred times slower"
        )
        return (_join_claim(claim, facts.fact(dtype).reason),)
    if dtype is DType.FLOAT16:
        return (
            "the CPU has float16 arithmetic, but framework libraries seldom use it in training; "
            "measure it first",
        )
    return ()


def _ranked(facts: DeviceFacts, policies: Sequence[Policy]) -> list[Policy]:
    """Sort by speed; among about equally fast ones float32's range goes before float16's."""
    speeds = _speeds(facts, policies)
    best = max(speeds.values(), default=0.0)

    def key(policy: Policy) -> tuple[int, int]:
        steps = math.log(best / speeds[policy], _SAME_SPEED_RATIO) if policy in speeds else 0.0
        return int(steps), _SIMPLEST_FIRST.index(policy)

    return sorted(policies, key=key)


def _speeds(facts: DeviceFacts, policies: Sequence[Policy]) -> dict[Policy, float]:
    """Measured speeds if all are measured, else the vendor's peaks if all are known, else none."""
    known = [facts.fact(p.compute_dtype) for p in policies]
    for speeds in (
        [fact.measured_gflops for fact in known],
        [fact.peak_dense_tflops for fact in known],
    ):
        known_speeds = {p: speed for p, speed in zip(policies, speeds, strict=True) if speed}
        if len(known_speeds) == len(policies):
            return known_speeds
    return {}


def _reasons(facts: DeviceFacts, policy: Policy) -> tuple[str, ...]:
    if policy is Policy.FLOAT32:
        return ("the reference everything is measured against",)
    dtype = policy.compute_dtype
    fact = facts.fact(dtype)
    how = "" if fact.evidence is Evidence.MEASURED else f" ({fact.evidence})"
    reasons = [_join_claim(f"{dtype} is {fact.support}{how}", fact.reason)]
    gain = _peak_ratio(facts, dtype)
    if gain is not None:
        reasons.append(f"peak {about_times(gain)} float32's")
    ratios = facts.measured_range(dtype)
    if ratios is not None and _may_be_slow(facts, policy):
        low, high = (about_times(each) for each in ratios)
        reasons.append(
            f"its products run at {low} to {high} float32's speed, as far as timings can tell: "
            "only training steps show more"
        )
    elif fact.support is Support.UNKNOWN:
        reasons.append("only a measurement can tell")
    if policy is Policy.MIXED_BFLOAT16:
        reasons.append("float32's range: no loss scale")
    if policy.needs_loss_scale:
        reasons.append("needs a loss scale")
    if policy is Policy.TF32:
        reasons.append("float32 code unchanged")
    return tuple(reasons)


def _describe_expectation(facts: DeviceFacts, accepted: tuple[Candidate, ...]) -> str:
    best = accepted[0].policy
    if best is Policy.FLOAT32:
        if len(accepted) > 1:
            return (
                "not known to be faster than float32: nothing can be expected before it is measured"
            )
        return "no speed-up over float32 is to be expected: no faster dtype is native here"
    ratio = facts.measured_ratio(best.compute_dtype)
    if ratio is not None:
        speed = f"{about_times(ratio)} float32's speed"
        return f"matrix products run {speed} (measured); {_WHOLE_MODEL_NOTE}"
    gain = _peak_ratio(facts, best.compute_dtype)
    if gain is not None:
        speed = f"{about_times(gain)} float32 by the vendor's peaks"
        return f"matrix products up to {speed}; {_WHOLE_MODEL_NOTE}"
    return "faster than float32 if matrix products dominate; only measuring tells"


def _peak_ratio(facts: DeviceFacts, dtype: DType) -> float | None:
    mine = facts.fact(dtype).peak_dense_tflops
    base = facts.fact(DType.FLOAT32).peak_dense_tflops
    return mine / base if mine is not None and base is not None else None


def _join_claim(claim: str, reason: str) -> str:
    return f"{claim}: {reason}" if reason else claim
