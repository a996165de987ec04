"""Trains two examples to a held-out accuracy: in float32 as they were, and with tuned profiles.

    python -m benchmarks.profiles.newcomer [--tasks digits_net digits_conv] [--seeds 5]

Each task is tuned as it is, and once more for each of --forced with no other policy allowed. Its
BATCH_SIZE stays the effective batch. Then the examples' own scripts train hundreds of steps, on as
many samples either way, in a process for each profile, and the accuracy on digits that were held
out is kept for each seed. Exit code 1 where a profile's mean lies below all of float32's seeds.
Nothing here is timed but by the tunings, so a busy machine changes recipes, not accuracies.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoprec.api import tune
from autoprec.core.codec import to_plain
from autoprec.core.dtypes import Policy
from autoprec.yaml_files import write_text
from benchmarks.checkout import RESULTS, ROOT
from benchmarks.profiles.newcomer_rows import HEAD, accuracies, in_a_line
from benchmarks.provenance import machine

FOLDER = ROOT / "examples" / "torch"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT32, TUNED = "float32 as it was", "tuned"

#: How long each task trains, in epochs: 380 and 330 updates.
EPOCHS = {"digits_net": 20, "digits_conv": 30}


def load(name: str) -> ModuleType:
    """Load an example as its users run it: with its folder on the path."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def counting(build: Callable[[], torch.nn.Module], seen: Counter[str]) -> Callable[[], Any]:
    """Build models that count the samples that they are trained on."""

    def built() -> torch.nn.Module:
        model = build()

        def count(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
            seen["samples"] += len(inputs[0]) if module.training else 0

        model.register_forward_hook(count)
        return model

    return built


def train_net(profile: Path | None, seed: int, epochs: int, seen: Counter[str]) -> float:
    """Run train_before.py, or train_after.py with the profile; the test accuracy."""
    script: Any = load("train_before" if profile is None else "train_after")
    script.build_model = counting(script.build_model, seen)
    words: list[object] = ["--epochs", epochs, "--patience", epochs, "--seed", seed, "--workers", 0]
    words += [] if profile is None else ["--profile", profile]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--checkpoint", Path(folder) / "digits.pt"]
        return float(script.main([str(word) for word in words]))


def train_conv(profile: Path | None, seed: int, epochs: int, seen: Counter[str]) -> float:
    """Run one of the two trainings of train_digits.py; the test accuracy."""
    script: Any = load("train_digits")
    one_epoch = script.one_epoch
    script.one_epoch = lambda batch_size, epoch: one_epoch(batch_size, 1000 * seed + epoch)
    torch.manual_seed(seed)
    model = counting(script.build_model, seen)().to(script.DEVICE)
    if profile is None:
        steps = script.train_float32(model, epochs)
    else:
        steps = script.train_tuned(model, epochs, profile)
    for _ in steps:
        pass
    return float(script.evaluate(model))


TRAIN = {"digits_net": train_net, "digits_conv": train_conv}


def trained(task: str, profile: Path | None, seeds: int, epochs: int) -> list[dict[str, Any]]:
    """Train once a seed: the accuracies, with how many samples and updates each took."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        seen: Counter[str] = Counter()

        def update(*_: Any, seen: Counter[str] = seen) -> None:
            seen["updates"] += 1

        hook = register_optimizer_step_post_hook(update)
        with contextlib.redirect_stdout(io.StringIO()):
            accuracy = TRAIN[task](profile, seed, epochs, seen)
        hook.remove()
        rows.append({"seed": seed, "accuracy": accuracy, **seen})
    return rows


def in_its_own_process(*arguments: Any) -> list[dict[str, Any]]:
    """`trained`, where no other profile has set anything of the process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(trained, *arguments).result()


def measure(task: str, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row: how a task trained in float32, or with the profile of a tuning made for it."""
    row: dict[str, Any] = {"task": task, "side": side}
    epochs = arguments.epochs or EPOCHS[task]
    if side == FLOAT32:
        return {**row, "runs": in_its_own_process(task, None, arguments.seeds, epochs)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.profile.yaml"
        profile = tune(
            FOLDER / f"{task}.py",
            device=DEVICE,
            policies=() if side == TUNED else (side,),
            trials=arguments.trials,
            output=path,
            storage=str(Path(folder) / "study.journal"),
        )
        runs = in_its_own_process(task, path, arguments.seeds, epochs)
    evidence = profile.evidence
    return {
        **row,
        "recipe": to_plain(profile.recipe),
        "reason": evidence.reason,
        "inconclusive": evidence.inconclusive,
        "parity": to_plain(evidence.parity),
        "runs": runs,
    }


def worse(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What trained worse than float32: the mean lies below all of float32's seeds."""
    float32 = {row["task"]: min(accuracies(row)) for row in rows if row["side"] == FLOAT32}
    return [
        f"{row['task']}, {row['side']}: {mean(accuracies(row)):.1%} on average, "
        f"float32 {float32[row['task']]:.1%} or more"
        for row in rows
        if mean(accuracies(row)) < float32[row["task"]]
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Tune, train, print and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=list(TRAIN), choices=list(TRAIN))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="instead of each task's own number")
    sixteen = [Policy.MIXED_BFLOAT16.value, Policy.MIXED_FLOAT16.value]
    parser.add_argument("--forced", nargs="*", default=sixteen, help="policies tuned alone, too")
    parser.add_argument("--trials", type=int, help="of each tuning, at most")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    head = machine(DEVICE)
    output = arguments.output or RESULTS / f"newcomer-{head['date']}-{head['family']}.json"
    rows: list[dict[str, Any]] = []
    print("\n".join(HEAD))
    for task in arguments.tasks:
        for side in (FLOAT32, TUNED, *arguments.forced):
            rows.append(measure(task, side, arguments))
            print(in_a_line(rows[-1]), flush=True)
            write_text(output, json.dumps({**head, "rows": rows}, indent=1) + "\n")
    for line in worse(rows):
        print(f"worse: {line}")
    return 1 if worse(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
