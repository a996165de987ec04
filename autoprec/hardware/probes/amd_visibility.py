"""Which AMD GPUs a process sees: ROCR_VISIBLE_DEVICES first, HIP_VISIBLE_DEVICES of the rest.

The two differ in every detail, and both from CUDA. Sources, ROCm 6 and 7:
ROCR: ROCR-Runtime, runtime/hsa-runtime/core/runtime/amd_filter_device.cpp and core/util/flag.h.
HIP: clr, rocclr/device/rocm/rocdevice.cpp (`Device::init`) and rocclr/utils/flags.cpp
(`Flag::init`, which reads a variable that is set but empty as one blank).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_PREFIX = "GPU-"
#: What the runtime calls a GPU that has no unique id; HIP finds such a one by it, ROCR does not.
_NAMELESS = "GPU-XX"
#: The lengths that ROCR takes for a whole or abbreviated identifier.
_SHORTEST, _LONGEST = 5, 20
#: What strtol reads to the end, base 0.
_INTEGER = re.compile(r"[+-]?(0x[0-9a-f]+|[0-9]+)", re.IGNORECASE)


def gpu_name(unique_id: int) -> str:
    """A GPU as the runtime names it: "GPU-" and 16 hexadecimal digits of KFD's `unique_id`."""
    return f"{_PREFIX}{unique_id:016x}" if unique_id else _NAMELESS


def left_by_rocr(names: Sequence[str], text: str | None) -> tuple[int, ...]:
    """The ordinals that ROCR_VISIBLE_DEVICES leaves of GPUs with these names, in its order.

    Unset shows all, empty none. An entry is an integer as in C, or an identifier that one GPU's
    begins with, in either case. The first entry that is neither, fits none, or repeats one, ends
    the list.
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


def left_by_hip(names: Sequence[str], text: str | None) -> tuple[int, ...]:
    """The ordinals that HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES without it, leaves.

    Unset shows all, empty none, and "-1" none. An entry is a plain decimal number, blanks and
    leading zeros being none, or an identifier: of several GPUs that it fits HIP takes the first.
    Anything else ends the list; a repeated entry is passed over.
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
