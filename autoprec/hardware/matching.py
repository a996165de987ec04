"""Which families describe an observation, by the conditions in the catalogue.

The conditions are data; this module knows only how each sort of condition is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

from autoprec.core.device.facts import Family, Match, Observation


def matches(family: Family, seen: Observation) -> bool:
    """Whether every condition that the family gives holds."""
    match = family.match
    return (
        family.kind is seen.kind
        and _found(match.name, seen.name)
        and _found(match.board, seen.board)
        and _equal(match.vendor, seen.vendor)
        and _equal(match.architecture, seen.architecture)
        and _capable(match.compute_capability, seen.compute_capability)
        and _equal(match.pci, seen.pci)
        and _equal(match.pci_subsystem, seen.pci_subsystem)
        and _equal(match.implementer, seen.implementer)
        and _equal(match.part, seen.part)
        and _within(match.cpu_family, seen.cpu_family)
        and _within(match.cpu_model, seen.cpu_model)
        and seen.features.issuperset(match.features)
        and seen.features.isdisjoint(match.lacks)
    )


def specificity(family: Family) -> tuple[int, int]:
    """How narrow a family is: its depth in the tree, then how many conditions it gives."""
    given = sum(bool(getattr(family.match, each.name)) for each in fields(Match))
    return len(family.ancestors), given


def _found(patterns: Iterable[str], text: str) -> bool:
    patterns = tuple(patterns)
    return not patterns or any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def _equal(texts: Iterable[str], text: str) -> bool:
    texts = tuple(each.lower() for each in texts)
    return not texts or text.lower() in texts


def _capable(ranges: Iterable[str], text: str) -> bool:
    """Whether a compute capability is one of "9.0", or from one of "8.0-" on."""
    ranges = tuple(ranges)
    if not ranges or not re.fullmatch(r"\d+\.\d+", text):
        return not ranges
    seen = _version(text)
    for each in ranges:
        low = _version(each.removesuffix("-"))
        if seen == low or (each.endswith("-") and seen > low):
            return True
    return False


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _within(ranges: Iterable[str], number: int | None) -> bool:
    """Whether a number is one of "17" or inside one of "16-31"."""
    ranges = tuple(ranges)
    if not ranges or number is None:
        return not ranges
    for text in ranges:
        low, _, high = text.partition("-")
        if int(low) <= number <= int(high or low):
            return True
    return False
