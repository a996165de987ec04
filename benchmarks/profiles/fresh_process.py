"""Does a profile keep its word in a process of its own? Its speed there, beside float32's.

Every task is tuned; then fresh processes train it in alternation: in a loop with the
profile, and in a plain float32 loop at the baseline's batch. Their ratio stands beside the one that
the profile claims. What the tuning did to its own processes (memory, threads) is not there. A Keras
task trains with `fit`, and once more with the profile's recipe set by Keras's own means.

    python -m benchmarks.profiles.fresh_process --tasks mlp lstm keras_conv
    python -m benchmarks.profiles.fresh_process --tasks gpt --device cuda --profile gpt.yaml
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoprec.api import tune
from autoprec.core.codec import to_plain
from autoprec.core.profile import Profile
from autoprec.core.speed.noise import paired_ratio
from autoprec.profiles import load_profile
from benchmarks.checkout import RESULTS, TASKS, child_environment
from benchmarks.peers.searches import KEPT
from benchmarks.profiles.holdout import APPLIED, AT_ITS_BATCH, PLAIN, alternated, own_batch
from benchmarks.provenance import machine
from benchmarks.search.oracle_rows import ratio_text

BY_HAND = "by hand"
TASK_NAMES = ("mlp", "lstm", "resnet", "encoder")
FURTHER_NAMES = ("gpt", "unet", "keras_conv", "keras_mlp")
ROUNDS = 6

#: Trains for some seconds after a warm-up and prints samples per second.
LOOP = """
import itertools, sys, time
import torch
sys.path.insert(0, sys.argv[1])
task = __import__(sys.argv[2])
path, batch, warm, seconds = sys.argv[3], int(sys.argv[4]), float(sys.argv[5]), float(sys.argv[6])
dtype, device = getattr(torch, sys.argv[7]), sys.argv[8]

torch.manual_seed(0)
model = task.build_model().to(device)
build = getattr(task, "build_optimizer", lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
optimizer = build(model)
precision = None
if path:
    from autoprec import apply_profile
    precision = apply_profile(path, model=model, optimizer=optimizer)
    batch = precision.batch_size
batches = itertools.islice(task.build_data(batch), 4)
batches = itertools.cycle([(inputs.to(device), targets.to(device)) for inputs, targets in batches])
wait = getattr(torch, device).synchronize if device != "cpu" else lambda: None

def step():
    inputs, targets = next(batches)
    if precision is None:
        with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
            outputs = model(inputs)
        task.loss_fn(outputs.float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        with precision.autocast():
            outputs = model(inputs)
        precision.backward(task.loss_fn(outputs, targets))
        precision.step()

def run(limit):
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < limit:
        step()
        steps += 1
        if steps % 10 == 0:
            wait()
    wait()
    return steps * batch / (time.perf_counter() - began)

run(warm)
print(run(seconds))
"""


def rate(
    task: Path,
    profile: Path | None,
    batch: int,
    seconds: float,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    variables: Mapping[str, str] | None = None,
) -> float:
    """Samples per second of one fresh process, with these environment variables from its start.

    Without a profile the loop is written by hand: autocast in `dtype`, none in float32.
    """
    words = [str(task.parent), task.stem, str(profile or ""), str(batch), "2", str(seconds), dtype]
    words += [device]
    done = subprocess.run(
        [sys.executable, "-c", LOOP, *words],
        env=child_environment(**(variables or {})),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def compare(
    name: str, rounds: int, seconds: float, *, device: str = "cpu", made: Path | None = None
) -> dict[str, Any]:
    """Train a task with its profile and in plain float32, in alternation; tune it before.

    Where a profile is there already (`made`), that one is held to its word. Float32 runs at the
    baseline's batch, and at the profile's where that is another: with freed memory kept if the
    profile keeps it, which is what it claims its speed-up over.
    """
    task = TASKS / f"{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        path = made or Path(folder) / "profile.yaml"
        if made is None:
            tune(task, device=device, output=path, storage=str(Path(folder) / "study.journal"))
        profile = load_profile(path)
        if name.startswith("keras"):
            return {"task": name, **_said(profile), **_keras(task, path, profile, rounds, seconds)}
        own, chosen = profile.evidence.baseline.batch_size, profile.recipe.batch_size
        arms: list[tuple[Path | None, int, Mapping[str, str]]] = [(path, 0, {}), (None, own, {})]
        if chosen != own:
            arms.append((None, chosen, KEPT if profile.recipe.keeps_memory else {}))
        rates: list[list[float]] = [[] for _ in arms]
        for number in range(rounds):
            order = [*enumerate(arms)][:: 1 if number % 2 == 0 else -1]
            for which, (given, batch, variables) in order:
                rates[which].append(
                    rate(task, given, batch, seconds, device=device, variables=variables)
                )
    return {
        "task": name,
        **_said(profile),
        "applied": to_plain(paired_ratio(rates[0], rates[1])),
        "applied_same_batch": to_plain(paired_ratio(rates[0], rates[-1])),
    }


def _said(profile: Profile) -> dict[str, Any]:
    """What a profile chose and claims."""
    evidence = profile.evidence
    same = evidence.speedup
    return {
        "recipe": to_plain(profile.recipe),
        "inconclusive": evidence.inconclusive,
        "claimed": to_plain(evidence.over_baseline),
        "claimed_same_batch": to_plain(same) if same.rounds else None,
    }


def _keras(task: Path, path: Path, profile: Profile, rounds: int, seconds: float) -> dict[str, Any]:
    """What a Keras profile gains, and how it does beside the same recipe written by hand."""
    recipe = profile.recipe
    if recipe.compile:
        raise SystemExit(f"{task.stem}: the recipe has XLA, which the loop by hand does not set")
    by_hand = ("--batch", recipe.batch_size, "--policy", recipe.policy.value)
    by_hand += ("--steps-per-execution", recipe.knobs.get("steps_per_execution", 0))
    sides: dict[str, tuple[object, ...]] = {
        APPLIED: ("--profile", path),
        PLAIN: ("--batch", own_batch(profile)),
        AT_ITS_BATCH: ("--batch", recipe.batch_size),
        BY_HAND: by_hand,
    }
    rates = alternated(task, sides, processes=rounds, rounds=1, seconds=seconds)
    return {
        "applied": to_plain(paired_ratio(rates[APPLIED], rates[PLAIN])),
        "applied_same_batch": to_plain(paired_ratio(rates[APPLIED], rates[AT_ITS_BATCH])),
        "applied_over_by_hand": to_plain(paired_ratio(rates[APPLIED], rates[BY_HAND])),
    }


def line(row: dict[str, Any]) -> str:
    """A line of the table."""
    claimed, applied = ratio_text(row["claimed"]), ratio_text(row["applied"])
    recipe = row["recipe"]
    return (
        f"{row['task']:10s} {recipe['policy']:15s} {recipe['batch_size']:5d}  "
        f"{claimed:20s} {applied}"
    )


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tasks", nargs="+", default=TASK_NAMES, choices=(*TASK_NAMES, *FURTHER_NAMES)
    )
    parser.add_argument("--device", default="cpu", help="torch's name for it, such as cuda")
    parser.add_argument("--profile", type=Path, help="of the one task: hold this one to its word")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.profile is not None and len(arguments.tasks) != 1:
        parser.error("--profile is that of one task: give --tasks NAME, too")
    head = machine(arguments.device)
    place = "" if arguments.device == "cpu" else f"-{head['family']}"
    output = arguments.output or RESULTS / f"applied-{head['date']}{place}.json"
    print("task       policy          batch  claimed              in fresh processes")
    rows = []
    for name in arguments.tasks:
        given = {"device": arguments.device, "made": arguments.profile}
        rows.append(compare(name, arguments.rounds, arguments.seconds, **given))
        print(line(rows[-1]), flush=True)
        output.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
