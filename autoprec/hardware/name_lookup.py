"""Devices by the names people use, present or not: "a100", "tpu v5e", "Tesla T4".

A device that is not in this machine is known from the catalogue only; its observation says so.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from autoprec.core.codec import abbreviate
from autoprec.core.device.family import Family
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import DType
from autoprec.errors import UsageError
from autoprec.hardware.catalogue import Catalogue, load_other_accelerators

#: Names listed at most; the rest is counted.
_MAX_LISTED = 20

_NOT_HERE = "not in this machine: known from the catalogue, neither probed nor measured"


def find_families(catalogue: Catalogue, text: str) -> tuple[Family, ...]:
    """Find the families that a text names: one if it is exact, several if it is ambiguous, or none.

    Exact is a family's name or title, with or without its vendor. Otherwise all words must be words
    of the name, the title or the architecture (or, failing that, beginnings of such words), and a
    family from which all the others descend stands for them. Last, the text may be the name that
    the device's driver reports. Case and punctuation are ignored.
    """
    words = _words(text)
    families = catalogue.families
    if not words:
        return ()
    exact = tuple(family for family in families if "".join(words) in _exact_names(family))
    if exact:
        return exact
    known = [
        (each, set(_words(" ".join((each.name, each.title, *each.match.architecture)))))
        for each in families
    ]
    whole = [family for family, names in known if names.issuperset(words)]
    begun = [
        family
        for family, names in known
        if all(any(name.startswith(word) for name in names) for word in words)
    ]
    return _common_ancestor(whole) or _common_ancestor(begun) or _by_pattern(families, text)


def resolve_family(catalogue: Catalogue, text: str) -> Family:
    """Return the one family that a text names.

    Raise `UsageError` with the list if there are several, or the nearest names if there is none.
    """
    named = find_families(catalogue, text)
    if len(named) == 1:
        return named[0]
    kinds = ", ".join(kind.value for kind in DeviceKind)
    for other in load_other_accelerators():
        if not named and _words(text) and set(_words(text)) <= set(_words(other.title)):
            raise UsageError(f"autoprec does not tune {other.title}: {other.advice}")
    if not named:
        near = _nearest(catalogue, text)
        hint = (
            f"did you mean {' or '.join(near)}?" if near else "`autoprec probe` lists the devices"
        )
        raise UsageError(
            f"unknown device {abbreviate(text)}: neither a kind of device ({kinds}) nor a family "
            f"in the catalogue; {hint}"
        )
    lines = [f"  {family.name}: {family.title}" for family in named[:_MAX_LISTED]]
    if len(named) > _MAX_LISTED:
        lines.append(f"  and {len(named) - _MAX_LISTED} more")
    raise UsageError(
        f"device {abbreviate(text)} matches {len(named)} families; give the name of one, or a kind "
        f"of device in this machine ({kinds}):\n" + "\n".join(lines)
    )


def hypothetical_observation(family: Family) -> Observation:
    """Return what a probe would observe of a device of this family, as far as its row tells.

    Memory, cores and driver are unknown; a row's `features` are those that all its processors have.
    """
    match = family.match
    return Observation(
        kind=family.kind,
        vendor=_first(match.vendor),
        architecture=_first(match.architecture),
        compute_capability=_first(match.compute_capability).removesuffix("-"),
        pci=_first(match.pci),
        pci_subsystem=_first(match.pci_subsystem),
        cpu_family=_lowest(match.cpu_family),
        cpu_model=_lowest(match.cpu_model),
        implementer=_first(match.implementer),
        part=_first(match.part),
        features=frozenset((*match.features, *family.features)),
        notes=(_NOT_HERE,),
        hypothetical=True,
    )


def with_vendor_figures(catalogue: Catalogue, family: Family) -> Family:
    """Return the family, or its first product whose row has the vendor's peaks and bandwidth.

    It is the family itself if no row has them (products of a family differ in both), or if those
    that do have other peaks than its own row.
    """

    def peak(row: Family) -> float | None:
        float32 = row.dtypes.get(DType.FLOAT32)
        return float32.peak_dense_tflops if float32 else None

    products = [row for row in catalogue.families if family.name in row.ancestors]
    told = [row for row in (family, *products) if row.memory_bandwidth_gbps and peak(row)]
    return next((row for row in told if peak(family) in (None, peak(row))), family)


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+", text.lower()))


def _exact_names(family: Family) -> set[str]:
    """Return the name and the title, each with and without its first word, the vendor."""
    return {
        "".join(words[start:])
        for words in (_words(family.name), _words(family.title))
        for start in (0, 1)
    }


def _common_ancestor(families: list[Family]) -> tuple[Family, ...]:
    """Return the family from which all the others descend, else all of them.

    A generic family stands for none.
    """
    for family in families:
        rest = [other for other in families if other is not family]
        if family.ancestors and all(family.name in other.ancestors for other in rest):
            return (family,)
    return tuple(families)


def _by_pattern(families: Iterable[Family], text: str) -> tuple[Family, ...]:
    """Return the deepest families that have a name pattern found in the text."""
    matching = [
        family
        for family in families
        if any(re.search(pattern, text, re.IGNORECASE) for pattern in family.match.name)
    ]
    deepest = max((len(family.ancestors) for family in matching), default=0)
    return tuple(family for family in matching if len(family.ancestors) == deepest)


def _nearest(catalogue: Catalogue, text: str) -> list[str]:
    """Return the names of up to three families with a similar spelling."""
    squeezed = "".join(_words(text[:80]))
    spelt = {each: family.name for family in catalogue.families for each in _exact_names(family)}
    close = difflib.get_close_matches(squeezed, spelt, n=5)
    return list(dict.fromkeys(spelt[each] for each in close))[:3]


def _first(texts: tuple[str, ...]) -> str:
    return texts[0] if texts else ""


def _lowest(ranges: tuple[str, ...]) -> int | None:
    return int(ranges[0].partition("-")[0]) if ranges else None
