"""How the time of a tuning grows with the model, the number of knobs and the range of batches.

    python -m benchmarks.search.growth

Every row is one `tune` from scratch of a multilayer perceptron. The seconds are those of the
tuner's stages; trials are what the search measured, of the points its space has.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoprec.api import tune
from autoprec.core.recipe import KnobValue
from autoprec.tuning.events import Described, Event
from benchmarks.checkout import RESULTS
from benchmarks.provenance import machine
from benchmarks.search.oracle import Clock
from benchmarks.search.oracle_rows import interleaved_timing

TASK = """
import torch
from torch import nn


def build_model():
    return nn.Sequential(
        nn.Linear(256, {width}), nn.ReLU(), nn.Linear({width}, {width}), nn.ReLU(),
        nn.Linear({width}, 10),
    )


def build_data(batch_size):
    while True:
        yield torch.randn(batch_size, 256), torch.randint(10, (batch_size,))


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
"""

KNOBS: Mapping[str, tuple[KnobValue, ...]] = {
    "fused_optimizer": (False, True),
    "implicit_bfloat16": (False, True),
    "threads": (2, 1),
}
WIDTHS = (128, 512, 1024, 2048, 4096)
RANGES = ("8-64", "8-1024", "1-4096")


class Watcher(Clock):
    """Also notes how many points the space has and how large the model is."""

    points = parameters = 0

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, Described):
            self.points, self.parameters = event.points, event.facts.parameters


def measure(what: str, width: int, knobs: int, batches: str) -> dict[str, Any]:
    """One tuning."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        task = folder / "task.py"
        task.write_text(TASK.format(width=width), encoding="utf-8")
        watcher = Watcher()
        profile = tune(
            task,
            device="cpu",
            listener=watcher,
            extras=False,
            knobs=dict(list(KNOBS.items())[:knobs]),
            batch_sizes=batches,
            output=folder / "profile.yaml",
            storage=str(folder / "study.journal"),
        )
    return {
        "what": what,
        "width": width,
        "parameters": watcher.parameters,
        "knobs": knobs,
        "batches": batches,
        "points": watcher.points,
        "trials": watcher.trials,
        "stages": watcher.seconds,
        "seconds": profile.evidence.tuning_seconds,
        "policy": profile.recipe.policy.value,
        "batch": profile.recipe.batch_size,
    }


def row(found: Mapping[str, Any]) -> str:
    """A line of the table."""
    stages = found["stages"]
    proof = stages.get("proof", 0.0) + stages.get("islands", 0.0)
    timing = interleaved_timing(stages)
    return (
        f"{found['what']:8s} {found['parameters'] / 1e6:6.2f} M {found['knobs']:5d} "
        f"{found['batches']:>7s} {found['trials']:4d} of {found['points']:3d} "
        f"{stages.get('search', 0.0):6.0f} s {proof:5.0f} s {timing:7.0f} s "
        f"{found['seconds']:6.0f} s  {found['policy']} {found['batch']}"
    )


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    head = machine()
    output = arguments.output or RESULTS / f"growth-{head['date']}.json"
    plans = [("model", width, 0, "8-1024") for width in WIDTHS]
    plans += [("knobs", 1024, knobs, "8-1024") for knobs in range(1, len(KNOBS) + 1)]
    plans += [("batches", 1024, 0, batches) for batches in RANGES if batches != "8-1024"]
    print("varied  parameters knobs batches     trials   search  proof   timing  total  chosen")
    rows = []
    for what, width, knobs, batches in plans:
        rows.append(measure(what, width, knobs, batches))
        print(row(rows[-1]), flush=True)
        output.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
