"""Devices by what people call them, here or not: "a100", "tpu v5e", "Tesla T4".

What is said of a device that is not here is the catalogue's alone; its observation says so.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from autoprec.core.codec import abbreviate
from autoprec.core.device.facts import DeviceKind, Family, Observation
from autoprec.core.dtypes import DType
from autoprec.errors import UsageError
from autoprec.hardware.catalogue import Catalogue
from autoprec.hardware.others import load_others

#: More than that is no answer to a question; the rest is counted.
_MOST_LISTED = 20

_NOT_HERE = "not here: by the catalogue alone, nothing was probed or measured"


def by_name(catalogue: Catalogue, text: str) -> tuple[Family, ...]:
    """The families that a text names: one where it is exact, several where it is not, or none.

    Exact is a family's name or title, with its vendor or without. Otherwise all words must be
    words of the name, the title or the architecture (or, if none has them, the beginnings of such),
    and a family that all the others descend from stands for them. Last, the text may be what the
    device's driver calls it. Case and punctuation do not count.
    """
    words = _words(text)
    families = catalogue.families
    if not words:
        return ()
    exact = tuple(family for family in families if "".join(words) in _exact(family))
    if exact:
        return exact
    known = [(family, _known_words(family)) for family in families]
    whole = [family for family, names in known if names.issuperset(words)]
    begun = [
        family
        for family, names in known
        if all(any(name.startswith(word) for name in names) for word in words)
    ]
    return _eldest(whole) or _eldest(begun) or _by_pattern(families, text)


def named(catalogue: Catalogue, text: str) -> Family:
    """The one family that a text names; raise `UsageError` with the list, or the nearest names."""
    found = by_name(catalogue, text)
    if len(found) == 1:
        return found[0]
    kinds = ", ".join(kind.value for kind in DeviceKind)
    for other in load_others():
        if not found and _words(text) and set(_words(text)) <= set(_words(other.title)):
            raise UsageError(f"autoprec does not tune {other.title}: {other.advice}")
    if not found:
        near = _nearest(catalogue, text)
        hint = f"did you mean {' or '.join(near)}?" if near else "`autoprec probe` shows what is."
        raise UsageError(
            f"unknown device {abbreviate(text)}: no kind of device here ({kinds}), and no family "
            f"of the catalogue; {hint}"
        )
    lines = [f"  {family.name}: {family.title}" for family in found[:_MOST_LISTED]]
    if len(found) > _MOST_LISTED:
        lines.append(f"  and {len(found) - _MOST_LISTED} more")
    raise UsageError(
        f"device {abbreviate(text)} may be any of {len(found)} families; name one of them, or a "
        f"kind of device here ({kinds}):\n" + "\n".join(lines)
    )


def hypothetical(family: Family) -> Observation:
    """What a probe would see of a device of this family, as far as the family's row tells.

    Memory, cores and driver are not known; a row's `features` are what all its processors show.
    """
    match = family.match
    return Observation(
        kind=family.kind,
        vendor=_first(match.vendor),
        architecture=_first(match.architecture),
        compute_capability=_first(match.compute_capability).removesuffix("-"),
        pci=_first(match.pci),
        pci_subsystem=_first(match.pci_subsystem),
        cpu_family=_low(match.cpu_family),
        cpu_model=_low(match.cpu_model),
        implementer=_first(match.implementer),
        part=_first(match.part),
        features=frozenset((*match.features, *family.features)),
        notes=(_NOT_HERE,),
        hypothetical=True,
    )


def with_figures(catalogue: Catalogue, family: Family) -> Family:
    """The family, or the first product of it, whose row has the vendor's peaks and bandwidth.

    The family itself where no row has them (products of a family differ in both), and where those
    that have them are faster or slower than it says of itself.
    """

    def peak(row: Family) -> float | None:
        float32 = row.dtypes.get(DType.FLOAT32)
        return float32.peak_dense_tflops if float32 else None

    products = [row for row in catalogue.families if family.name in row.ancestors]
    told = [row for row in (family, *products) if row.memory_bandwidth_gbps and peak(row)]
    return next((row for row in told if peak(family) in (None, peak(row))), family)


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+", text.lower()))


def _exact(family: Family) -> set[str]:
    """The name and the title, each with and without its first word, the vendor."""
    return {
        "".join(words[start:])
        for words in (_words(family.name), _words(family.title))
        for start in (0, 1)
    }


def _known_words(family: Family) -> set[str]:
    return set(_words(" ".join((family.name, family.title, *family.match.architecture))))


def _eldest(families: list[Family]) -> tuple[Family, ...]:
    """The family that all the others descend from, else all; what is generic stands for none."""
    for family in families:
        rest = [other for other in families if other is not family]
        if family.ancestors and all(family.name in other.ancestors for other in rest):
            return (family,)
    return tuple(families)


def _by_pattern(families: Iterable[Family], text: str) -> tuple[Family, ...]:
    """The deepest families one of whose own names' patterns is found in the text."""
    found = [
        family
        for family in families
        if any(re.search(pattern, text, re.IGNORECASE) for pattern in family.match.name)
    ]
    deepest = max((len(family.ancestors) for family in found), default=0)
    return tuple(family for family in found if len(family.ancestors) == deepest)


def _nearest(catalogue: Catalogue, text: str) -> list[str]:
    """The names of up to three families that are spelt almost so."""
    squeezed = "".join(_words(text[:80]))
    spelt = {each: family.name for family in catalogue.families for each in _exact(family)}
    close = difflib.get_close_matches(squeezed, spelt, n=5)
    return list(dict.fromkeys(spelt[each] for each in close))[:3]


def _first(texts: tuple[str, ...]) -> str:
    return texts[0] if texts else ""


def _low(ranges: tuple[str, ...]) -> int | None:
    return int(ranges[0].partition("-")[0]) if ranges else None
