"""Which families describe an observation, by the conditions in the catalogue.

The conditions are data; this module only knows how each type of condition is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

from autoprec.core.device.family import Family, Match
from autoprec.core.device.observation import Observation


def matches(family: Family, observation: Observation) -> bool:
    """Tell whether every condition of the family holds for the observation."""
    match = family.match
    return (
        family.kind is observation.kind
        and _found(match.name, observation.name)
        and _found(match.board, observation.board)
        and _equal(match.vendor, observation.vendor)
        and _equal(match.architecture, observation.architecture)
        and _capable(match.compute_capability, observation.compute_capability)
        and _equal(match.pci, observation.pci)
        and _equal(match.pci_subsystem, observation.pci_subsystem)
        and _equal(match.implementer, observation.implementer)
        and _equal(match.part, observation.part)
        and _within(match.cpu_family, observation.cpu_family)
        and _within(match.cpu_model, observation.cpu_model)
        and observation.features.issuperset(match.features)
        and observation.features.isdisjoint(match.lacks)
    )


def specificity(family: Family) -> tuple[int, int]:
    """Rank how narrow a family is: its depth in the tree, then its number of conditions."""
    conditions = sum(bool(getattr(family.match, each.name)) for each in fields(Match))
    return len(family.ancestors), conditions


def _found(patterns: Iterable[str], text: str) -> bool:
    patterns = tuple(patterns)
    return not patterns or any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def _equal(texts: Iterable[str], text: str) -> bool:
    texts = tuple(each.lower() for each in texts)
    return not texts or text.lower() in texts


def _capable(ranges: Iterable[str], text: str) -> bool:
    """Tell whether a compute capability is in ranges such as "9.0" (exactly) and "8.0-" (from)."""
    ranges = tuple(ranges)
    if not ranges or not re.fullmatch(r"\d+\.\d+", text):
        return not ranges
    version = _version(text)
    for each in ranges:
        low = _version(each.removesuffix("-"))
        if version == low or (each.endswith("-") and version > low):
            return True
    return False


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _within(ranges: Iterable[str], number: int | None) -> bool:
    """Tell whether a number is in ranges such as "17" and "16-31"."""
    ranges = tuple(ranges)
    if not ranges or number is None:
        return not ranges
    for text in ranges:
        low, _, high = text.partition("-")
        if int(low) <= number <= int(high or low):
            return True
    return False
