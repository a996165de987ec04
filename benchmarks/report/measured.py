"""What was measured on which machine, read from the results themselves, and what on none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checkout import RESULTS, ROOT
from benchmarks.report import gpu
from benchmarks.report.latest import MACHINES, NOT_KEPT, head_of, machine_name, name_and_day

RECORDINGS = ROOT / "profiles" / "recordings"

#: By the prefix of a result's file what it measured. Replays train nothing, on any machine.
NAMES = {
    "oracle": "the tuner against an exhaustive search",
    "peers": "the tuner beside other tools",
    "holdout": "tasks held out",
    "applied": "profiles in fresh processes",
    "overhead": "the cost of `apply_profile`",
    "startup": "start-up",
    "growth": "how tuning time grows",
    "regret": "tuning while others come and go",
    "null": "false speed-ups",
    "reduce_dtype": "what gradients travel in",
    "keep_memory": "kept memory",
    "memory_growth": "kept memory over a long training",
    "compiled": "torch.compile",
    "ablation": "an LSTM's settings",
    "numerics": "numerics (torch)",
    "numerics_keras": "numerics (Keras)",
    "loss_constants": "a constant in the loss",
    "proof_costs": "what a check costs",
    "watched": "checks during training",
    "late_breaks": "what breaks late",
    "islands": "speed kept by islands",
    "soak": "faults",
    "fuzz": "malformed files",
}

UNMEASURED = """\
## Not measured

Only x86 CPUs and two NVIDIA GPUs were available. Everything else is written against documented
interfaces and tested with synthetic probe recordings, by simulation, or in a rehearsal: real
numbers and torch's own code on a [pretended device](../CONTRIBUTING.md#rehearse-an-accelerator),
which says nothing about speed or the device's own numerics.

| | measured on hardware | without hardware |
|---|---|---|
| other x86 CPUs | no result kept | probe replayed |
| Arm CPU | nothing | probe replayed |
| other NVIDIA GPUs, PyTorch | nothing | probe replayed; rehearsed 2026-11-24: seven tasks tuned, \
checked and trained (GPT-2 of transformers among them), islands, out of memory, neighbours, \
faults, a killed tuning, the torch examples and ten tasks of `tests/zoo` tuned |
| AMD, Intel and Apple GPU, PyTorch | nothing | probe replayed; rehearsed 2026-11-24: one task \
tuned, checked and trained on each |
| any GPU, Keras on TensorFlow | nothing | probe replayed; rehearsed 2026-11-24: what is decided \
by TensorFlow's answers about its devices, the three examples tuned; not where anything is placed |
| several processes or replicas | two on one CPU, as tests: `DistributedDataParallel` over gloo, \
`MirroredStrategy` | rehearsed 2026-11-24: `DistributedDataParallel` over gloo, a GPU each |
| TPU, `TPUStrategy` | nothing | probe replayed; simulated at the border |
"""


def measured(folder: Path = RESULTS, recordings: Path = RECORDINGS) -> Iterator[str]:
    """A row for each machine: what was measured there, with the newest date of each."""
    found: dict[str, dict[str, str]] = {machine: {} for machine in MACHINES.values()}
    for path in sorted(folder.glob("*.json*")):
        name, day = name_and_day(path)
        if name in NAMES:
            head = head_of(path)
            ways = ", ".join(dict.fromkeys(case["way"] for case in head.get("cases", ())))
            what = f"{NAMES[name]} ({ways})" if ways else NAMES[name]
            machine = machine_name(head["family"]) if "family" in head else NOT_KEPT
            row = found.setdefault(machine, {})
            row[what] = max(day, row.get(what, ""))
    for device, pieces in gpu.read(folder).items():
        what = f"`make gpu-evidence` ({', '.join(pieces)})"
        newest = max(str(rows[0]["date"]) for rows in pieces.values())
        found.setdefault(device, {})[what] = newest
    for family, machine in MACHINES.items():
        path = recordings / f"{family}.json"
        if path.exists() and not json.loads(path.read_text(encoding="utf-8"))["synthetic"]:
            found[machine]["probe recorded"] = ""
    yield "| machine | measured there, and when last |"
    yield "|---|---|"
    unnamed = found.pop(NOT_KEPT, {})
    for machine, row in {**found, NOT_KEPT: unnamed}.items():
        said = [f"{what}: {day}" if day else what for what, day in row.items()]
        if said:
            yield f"| {machine} | {'; '.join(said)} |"
