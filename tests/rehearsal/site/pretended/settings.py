"""What is pretended here, as `rehearsal.Rehearsal.environment` wrote it into the environment."""

from __future__ import annotations

import json
import os
from typing import Any

GIB = 2**30
GIVEN: dict[str, Any] = json.loads(os.environ["REHEARSAL"])

#: "cuda", "rocm", "xpu" or "mps", and what torch calls it.
KIND: str = GIVEN["kind"]
TYPE = "cuda" if KIND == "rocm" else KIND
HAS_FLOAT64: bool = GIVEN["float64"]
FAULTS: list[dict[str, Any]] = GIVEN["faults"]

#: Where the processes of one rehearsal write how much they hold of each GPU.
FOLDER: str = GIVEN["folder"]

#: Every GPU of the machine, in the bus's order, with name, capability, uuid, bytes, others, hidden.
MACHINE: list[dict[str, Any]] = GIVEN["gpus"]


def visible() -> list[dict[str, Any]]:
    """The GPUs that this process sees, in its order: what the visibility variable leaves.

    CUDA puts the fastest first (here: of the highest capability) unless it is told otherwise, and
    so does what is pretended of Level Zero, whose order nobody promises.
    """
    shown = [gpu for gpu in MACHINE if not gpu["hidden"]]
    if KIND in ("cuda", "xpu") and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        shown.sort(key=lambda gpu: float(gpu["capability"]), reverse=True)
    names = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
    text = os.environ.get(names[KIND]) if KIND in names else None
    if text is None:
        return shown
    chosen: list[dict[str, Any]] = []
    for entry in (each.strip() for each in text.split(",")):
        if entry.isdigit() and int(entry) < len(shown):
            chosen.append(shown[int(entry)])
        elif entry.startswith("GPU-"):
            found = [gpu for gpu in shown if gpu["uuid"].startswith(entry)]
            if len(found) != 1:
                break
            chosen += found
        else:
            break
    return chosen


GPUS = visible()
