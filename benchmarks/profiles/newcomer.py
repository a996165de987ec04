"""Trains the newcomer's script before and after the change, and prints the test accuracies.

    python -m benchmarks.profiles.newcomer [--seeds 5] [--epochs 12]

examples/torch/train_before.py trains in float32 at batch 64; train_after.py applies a recipe of
each policy at batch 16 with four accumulation steps. Nothing is timed: the machine may be busy.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from types import ModuleType

import torch

from autoprec import Recipe, apply_profile
from benchmarks.checkout import RESULTS
from benchmarks.provenance import commit, today

FOLDER = Path(__file__).parent.parent / "examples" / "torch"
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_recipe(policy: str) -> ModuleType:
    """Load train_after.py so that it applies this recipe, whatever profile it names."""
    script = load("train_after")
    recipe = Recipe(policy=policy, batch_size=16, accumulation_steps=4)  # type: ignore[arg-type]
    script.apply_profile = lambda _, **named: apply_profile(recipe, **named)
    return script


def accuracies(script: ModuleType, seeds: int, epochs: int) -> list[float]:
    """Train once a seed; return the test accuracies."""
    found = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for seed in range(seeds):
            words = ["--epochs", epochs, "--seed", seed, "--workers", 0]
            words += ["--checkpoint", Path(folder) / "digits.pt"]
            found.append(script.main([str(word) for word in words]))
    return found


def row(name: str, found: list[float]) -> str:
    return f"| {name} | {mean(found):.1%} | {min(found):.1%} to {max(found):.1%} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the newcomer's script before and after.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--output", type=Path, default=RESULTS / f"newcomer-{today()}.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {arguments.seeds} seeds, {arguments.epochs} epochs\n")
    print("| script | test accuracy, mean | over the seeds |\n|---|---|---|")
    rows = {"before": accuracies(load("train_before"), arguments.seeds, arguments.epochs)}
    print(row("before", rows["before"]), flush=True)
    for policy in POLICIES:
        found = accuracies(with_recipe(policy), arguments.seeds, arguments.epochs)
        name = f"after, {policy}, batch 16 x 4"
        rows[name] = found
        print(row(name, found), flush=True)
    found_by = {"seeds": arguments.seeds, "epochs": arguments.epochs, "torch": torch.__version__}
    result = {"date": today(), "commit": commit(), **found_by, "rows": rows}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
