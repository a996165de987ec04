"""Reads profiles of schemas 1 and 2 for what their ratios meant."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autoprec.core.codec import DecodeError, from_plain
from autoprec.core.profile import NOT_COMPARED, SCHEMA, Profile
from autoprec.core.ratio import Ratio

EARLIER = (1, 2)
"""The schemas of earlier versions."""


@dataclass(frozen=True)
class _Ratios:
    """What earlier schemas had: over the baseline, and over float32 at the same batch."""

    speedup: Ratio = NOT_COMPARED
    speedup_same_batch: Ratio | None = None


def profile_from_plain(document: Mapping[str, Any]) -> Profile:
    """Read a profile of any known schema from plain values; raise `DecodeError` as `from_plain`."""
    schema = document.get("schema")
    if schema not in EARLIER:
        return from_plain(Profile, document)
    evidence = document.get("evidence")
    rest = dict(evidence) if isinstance(evidence, Mapping) else {}
    given = {each.name: rest.pop(each.name) for each in fields(_Ratios) if each.name in rest}
    ratios = from_plain(_Ratios, given, "evidence")
    known = {"schema": SCHEMA, **({"evidence": rest} if rest else {})}
    profile = from_plain(Profile, {**document, **known})
    if schema == 1 and profile.recipe.distributed is not None:
        why = f"schema 1 has no section recipe.distributed; write schema {SCHEMA}"
        raise DecodeError("recipe.distributed", why)
    own_batch = profile.recipe.effective_batch == profile.baseline.effective_batch
    if own_batch or not ratios.speedup.rounds:
        return replace(profile, evidence=replace(profile.evidence, speedup=ratios.speedup))
    alike = ratios.speedup_same_batch or NOT_COMPARED
    read = replace(profile.evidence, speedup=alike, throughput=ratios.speedup)
    return replace(profile, evidence=read)
