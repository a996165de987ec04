"""How often is a speed-up claimed where there is none? Recipes that are the same, really.

With torch, float32 is tuned against itself with a knob that means nothing on a CPU
(`cudnn_benchmark`). Simulated, policies take as long as each other, and every timing is off by as
much as the rounds of recorded runs differed by (benchmarks/results/): 200 tunings take minutes, for
nothing of them waits. A tuning claims a speed-up where it chooses another policy, or that knob.

    python -m benchmarks.search.false_speedups        # ten tunings with torch
    python -m benchmarks.search.false_speedups --simulated 200
    python -m benchmarks.search.false_speedups --simulated 200 --policies 4

The last offers three other recipes, so that one of them may be lucky. The exit code is 1 where more
than one tuning in twenty claims a speed-up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoprec.core.codec import to_plain
from autoprec.core.device.facts import DeviceFacts, DTypeFact, Evidence
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import DType, Policy
from autoprec.core.number_words import times
from autoprec.core.profile import Profile
from autoprec.core.ratio import Ratio
from autoprec.tuning.flow.tuner import tune
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.workers.task_source import TaskSource
from benchmarks.checkout import FRAMEWORKS, RESULTS, TASKS

TASK_NAMES = ("mlp", "tiny", "lstm", "encoder", "resnet")
POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16, Policy.TF32)

#: The share of tunings that may claim a speed-up: what intervals of 95 % leave to chance.
MOST_CLAIMED = 0.05

TASK = """
from simulated import SimulatedModel

def build_model():
    return SimulatedModel(drift={drift!r})

def build_data(batch_size):
    return []
"""


@dataclass(frozen=True)
class Tuned:
    """What one tuning claims, on what."""

    where: str
    claimed: bool
    ratio: Ratio
    inconclusive: bool


def claim_of(where: str, profile: Profile) -> Tuned:
    """What a profile claims: another policy, or the knob that means nothing, is a false speed-up.

    A memory format may be a true one, and is none of the recipes that are the same.
    """
    recipe, evidence = profile.recipe, profile.evidence
    other = recipe.policy is not Policy.FLOAT32 or bool(recipe.knobs)
    return Tuned(where, other, evidence.over_baseline, bool(evidence.inconclusive))


# With torch --------------------------------------------------------------------------------------


def with_torch(count: int) -> Iterator[Tuned]:
    """Tune float32 against float32 with a knob that changes nothing on a CPU."""
    from autoprec.api import tune as tune_here

    for seed in range(count):
        name = TASK_NAMES[seed % len(TASK_NAMES)]
        with tempfile.TemporaryDirectory() as folder:
            profile = tune_here(
                TASKS / f"{name}.py",
                device="cpu",
                policies=(Policy.FLOAT32,),
                batch_sizes=(32,),
                knobs={"cudnn_benchmark": (False, True)},
                extras=False,
                seed=seed,
                wait=True,
                output=Path(folder) / "profile.yaml",
                storage=str(Path(folder) / "study.journal"),
            )
        yield claim_of(f"{name}, seed {seed}", profile)


# Simulated ---------------------------------------------------------------------------------------


def recorded_noise(folder: Path = RESULTS) -> list[float]:
    """By how much single rounds differed in every recorded run: relative standard deviations.

    A run of n rounds keeps the 95 % interval of its ratio's pseudomedian, which is 3.92 standard
    deviations of a round over sqrt(0.955 n) wide where errors are normal (Hodges and Lehmann).
    Shares of a step (exposed communication) are no ratios of rates.
    """

    def ratios(kept: Any) -> Iterator[Mapping[str, Any]]:
        if isinstance(kept, dict):
            if {"ratio", "low", "high", "rounds"} <= kept.keys():
                yield kept
            kept = [each for name, each in kept.items() if not name.startswith("exposed")]
        if isinstance(kept, list):
            for each in kept:
                yield from ratios(each)

    found = []
    for path in sorted(folder.glob("*.json*")):
        text = path.read_text(encoding="utf-8")
        kept = map(json.loads, text.splitlines()) if path.suffix == ".jsonl" else [json.loads(text)]
        for ratio in ratios(list(kept)):
            if ratio["rounds"] >= 6 and 0 < ratio["low"] < ratio["high"]:
                width = math.log(ratio["high"] / ratio["low"])
                found.append(width * math.sqrt(0.955 * ratio["rounds"]) / 3.92)
    return found


def simulated(count: int, policies: Sequence[Policy]) -> Iterator[Tuned]:
    """Tune policies that take as long as each other, in this process."""
    if str(FRAMEWORKS) not in sys.path:
        sys.path.append(str(FRAMEWORKS))
    from simulated.in_process import InProcessWorker

    noise = recorded_noise()
    native = DTypeFact(Support.NATIVE, Evidence.MEASURED)
    facts = DeviceFacts(
        Observation(DeviceKind.CPU, uuid=f"simulated by {os.getpid()}"),  # nobody's to wait for
        "simulated",
        "simulated",
        dict.fromkeys(DType, native),
    )
    for seed in range(count):
        drift = random.Random(seed).choice(noise)
        with tempfile.TemporaryDirectory() as folder:
            task = Path(folder) / "the_same.py"
            task.write_text(TASK.format(drift=drift), encoding="utf-8")
            options = Options(
                policies=tuple(policies),
                batch_sizes=(32,),
                seed=seed,
                storage=str(Path(folder) / "study.journal"),
                wait=True,
            )
            target = Target(facts, {}, lambda known, _: known)
            job = TuningJob(
                TaskSource(task), target, options, lambda event: None, start=InProcessWorker
            )
            profile = tune(job)
        yield claim_of(f"noise {drift:.1%}, seed {seed}", profile)


def summary(found: Sequence[Tuned]) -> str:
    """A line for all of them."""
    claimed = [each for each in found if each.claimed]
    worst = max((each.ratio.ratio for each in claimed), default=1.0)
    inconclusive = sum(each.inconclusive for each in found)
    return (
        f"{len(found)} tunings of identical recipes: {len(claimed)} claim a speed-up "
        f"({len(claimed) / len(found):.1%}), at most {times(worst)}; {inconclusive} are "
        "inconclusive"
    )


def too_many(found: Sequence[Tuned]) -> bool:
    """Whether more tunings claim a speed-up than may."""
    return sum(each.claimed for each in found) > MOST_CLAIMED * len(found)


def main(words: Sequence[str] | None = None) -> int:
    """Run, print, store, and fail where more than one in twenty claims a speed-up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--simulated", type=int, default=0, metavar="COUNT")
    parser.add_argument("--torch", type=int, default=10, metavar="COUNT")
    parser.add_argument("--policies", type=int, default=2, help="how many are the same")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    if arguments.simulated:
        runs = simulated(arguments.simulated, POLICIES[: arguments.policies])
    else:
        runs = with_torch(arguments.torch)
    found = []
    began = time.monotonic()
    for each in runs:
        found.append(each)
        if each.claimed or not arguments.simulated:
            print(
                f"{each.where}: {'claims' if each.claimed else 'keeps float32,'} "
                f"{each.ratio.in_words()}" + (", inconclusive" if each.inconclusive else ""),
                flush=True,
            )
    seconds = time.monotonic() - began
    print(f"{summary(found)}; {seconds:.0f} s")
    if found:
        simulated_as = f"simulated, {arguments.policies} policies"
        keep(simulated_as if arguments.simulated else "torch", found, seconds, arguments.output)
    return 1 if too_many(found) else 0


def keep(kind: str, found: Sequence[Tuned], seconds: float, output: Path | None) -> None:
    """Write a run into the day's result, beside those of the other kinds."""
    from benchmarks.provenance import machine

    head = machine()
    path = output or RESULTS / f"null-{head['date']}-{head['family']}.json"
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else {}
    runs[kind] = {"seconds": seconds, "summary": summary(found), "rows": to_plain(found)}
    path.write_text(json.dumps({**head, "runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
