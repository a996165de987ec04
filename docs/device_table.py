"""The page of devices, made from the catalogue: which policies its rules try on each, and why."""

from __future__ import annotations

from collections import defaultdict

from autoprec.core.device.family import Family
from autoprec.core.device.merging import merge
from autoprec.core.device.policies import propose
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.name_lookup import hypothetical_observation

_HEAD = """\
# Devices

What the catalogue's rules try on each family of devices, best first, and what they refuse. It is
what `autoprec probe --device NAME` prints; a tuning measures and proves before it takes any of it.
Devices that are not here are probed all the same, by what their driver and framework report.
"""

_TITLES = {
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD GPUs",
    "xpu": "Intel GPUs",
    "mps": "Apple GPUs",
    "tpu": "Google TPUs",
    "cpu": "CPUs",
}


def device_page() -> str:
    """Return the page as Markdown."""
    kinds: dict[str, list[Family]] = defaultdict(list)
    for family in load_catalogue().families:
        kinds[family.kind.value].append(family)
    parts = [_HEAD]
    for kind in sorted(kinds, key=lambda each: list(_TITLES).index(each) if each in _TITLES else 9):
        parts.append(f"## {_TITLES.get(kind, kind)}\n")
        parts.append("| family | device | tried, best first | refused |\n|---|---|---|---|")
        parts += [_row(family) for family in kinds[kind]]
        parts.append("")
    return "\n".join(parts) + "\n"


def _row(family: Family) -> str:
    found = propose(merge(hypothetical_observation(family), family))
    tried = ", ".join(f"`{each.policy.value}`" for each in found.candidates)
    refused = "; ".join(f"`{each.candidate}`: {each.reason}" for each in found.refusals)
    cells = (f"`{family.name}`", family.title, tried, refused)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
