"""Which AMD GPUs a process sees: by ROCR_VISIBLE_DEVICES, then by HIP_VISIBLE_DEVICES.

The two differ from each other in every detail, and from CUDA. Sources, ROCm 6 and 7:
ROCR: ROCR-Runtime, runtime/hsa-runtime/core/runtime/amd_filter_device.cpp and core/util/flag.h.
HIP: clr, rocclr/device/rocm/rocdevice.cpp (`Device::init`) and rocclr/utils/flags.cpp
(`Flag::init`, which reads a variable that is set but empty as one blank).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_PREFIX = "GPU-"
#: The runtime's name for a GPU without a unique id; HIP finds the GPU by it, ROCR does not.
_NAMELESS = "GPU-XX"
#: The lengths of a full or abbreviated identifier that ROCR accepts.
_SHORTEST, _LONGEST = 5, 20
#: What C's strtol reads to the end with base 0.
_INTEGER = re.compile(r"[+-]?(0x[0-9a-f]+|[0-9]+)", re.IGNORECASE)


def gpu_name(unique_id: int) -> str:
    """Name a GPU as the runtime does: "GPU-" and 16 hexadecimal digits of KFD's `unique_id`."""
    return f"{_PREFIX}{unique_id:016x}" if unique_id else _NAMELESS


def visible_to_rocr(names: Sequence[str], text: str | None) -> tuple[int, ...]:
    """Return the ordinals of the GPUs that ROCR_VISIBLE_DEVICES shows, in its order.

    Unset shows all, empty none. An entry is an integer as in C, or the beginning of exactly one
    GPU's identifier, in upper or lower case. The first entry that is neither, or repeats an
    earlier one, ends the list.
    """
    if text is None:
        return tuple(range(len(names)))
    kept: list[int] = []
    for entry in text.split(","):
        ordinal = _rocr_ordinal(names, entry.strip().upper())
        if ordinal in kept or not 0 <= ordinal < len(names):
            break
        kept.append(ordinal)
    return tuple(kept)


def _rocr_ordinal(names: Sequence[str], entry: str) -> int:
    if entry.startswith("G"):
        named = [name.upper() if name != _NAMELESS else "" for name in names]
        found = [i for i, name in enumerate(named) if name.startswith(entry)]
        return found[0] if _SHORTEST <= len(entry) <= _LONGEST and len(found) == 1 else -1
    if not _INTEGER.fullmatch(entry):
        return -1
    digits = entry.lstrip("+-").lower()
    octal = digits.startswith("0") and not digits.startswith("0x")
    if octal and not set(digits) <= set("01234567"):
        return -1
    number = int(digits, 8 if octal else 0)
    return -number if entry.startswith("-") else number


def visible_to_hip(names: Sequence[str], text: str | None) -> tuple[int, ...]:
    """Return the ordinals of the GPUs that HIP_VISIBLE_DEVICES shows (or CUDA_VISIBLE_DEVICES).

    Unset shows all, empty and "-1" show none. An entry is a plain decimal number without blanks or
    leading zeros, or an identifier: if several GPUs match, HIP takes the first. Anything else ends
    the list; a repeated entry is skipped.
    """
    if text is None:
        return tuple(range(len(names)))
    kept: dict[int, None] = {}
    for entry in text.split(","):
        ordinal = _hip_ordinal(names, entry)
        if ordinal is None:
            break
        kept[ordinal] = None
    return tuple(kept)


def _hip_ordinal(names: Sequence[str], entry: str) -> int | None:
    if _PREFIX in entry:
        return next((i for i, name in enumerate(names) if entry in name), None)
    return next((i for i in range(len(names)) if entry == str(i)), None)
