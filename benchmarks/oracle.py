"""How near the tuner comes to an exhaustive search, and at what share of its cost.

For every task: the whole grid (policy, batch, layout, XLA, and for PyTorch whether freed memory is
kept), each recipe in a fresh process; then `autoprec tune` from scratch;
then the chosen recipe, the grid's best and the float32 baseline in alternation. Prints a table per
task with the geometric means, and writes every number as JSON lines.

    python benchmarks/oracle.py --tasks mlp conv --seconds 3
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from alternation import Sharpness, alternate

from autoprec.api import probe, tune
from autoprec.backends.products import measure_products
from autoprec.core.codec import from_plain, to_plain
from autoprec.core.measurement import TimingBudget
from autoprec.core.outcomes import Outcome, Status, key
from autoprec.core.profile import Profile
from autoprec.core.recipe import KEEP_MEMORY, KnobValue, Recipe
from autoprec.core.rules import propose
from autoprec.core.space import Point, Space
from autoprec.core.statistics import Ratio, paired_ratio
from autoprec.documents import write_text
from autoprec.tuning.events import Event, Finished, Stage, TrialFinished
from autoprec.tuning.options import Options
from autoprec.tuning.preflight import build_space, preflight
from autoprec.tuning.study import Study
from autoprec.tuning.trials import Runner, run_trial
from autoprec.tuning.work import Place, Work

#: What both the grid and the tuner try besides policy, batch, layout and XLA.
KNOBS: Mapping[str, tuple[KnobValue, ...]] = {KEEP_MEMORY: (False, True)}

Save = Callable[[Sequence[Outcome]], None]

ROOT = Path(__file__).parent.parent
TASKS = Path(__file__).parent / "tasks"
RESULTS = Path(__file__).parent / "results"
CURVES = Path(__file__).parent / "curves"


def commit() -> str:
    """The commit that is measured; with -dirty where autoprec/ differs from it."""

    def git(*words: str) -> str:
        said = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return said.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "autoprec")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine(device: str = "cpu") -> dict[str, Any]:
    """What every result begins with: date, commit, device and versions."""
    seen = probe(device=device)
    facts = seen.devices[0].facts
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": facts.name,
        "family": facts.family,
        "python": platform.python_version(),
        **{framework.name: framework.version for framework in seen.frameworks},
    }


class Clock:
    """Times the tuner's stages from its events."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.trials = self.killed = self.peak = 0
        self._stage, self._since = "start", time.monotonic()

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrialFinished):
            self.trials += 1
            self.killed += event.outcome.status is Status.KILLED
            if event.outcome.measurement is not None:
                self.peak = max(self.peak, event.outcome.measurement.peak_memory_bytes)
        if isinstance(event, Stage | Finished):
            now = time.monotonic()
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
            self._stage = event.name if isinstance(event, Stage) else "end"
            self._since = now


def make_work(path: Path, folder: Path, wide: bool = False) -> tuple[Work, Space]:
    """The work order and the space that the tuner would search for a task.

    `wide` takes further knobs in as well.
    """
    seen = probe(device="cpu")
    names = [framework.name for framework in seen.frameworks]
    facts = measure_products(seen.devices[0].facts, names)
    place = Place(facts, {}, lambda known: known)
    work = Work(
        path,
        place,
        Options(storage=str(folder / "preflight.journal"), extras=wide, knobs=KNOBS),
        lambda event: None,
    )
    with work.runner() as runner:
        study = Study(work.options.storage or "", "preflight")
        task = preflight(work, study, runner)
    return work, build_space(work, task, facts, propose(facts))


def measure_grid(
    work: Work, space: Space, seconds: float, known: Sequence[Outcome], save: Save
) -> list[Outcome]:
    """Every recipe of the space in a process of its own, `seconds` of steps each.

    What is `known` is not measured again; `save` is told of all there is after each recipe.
    """
    measured = {key(outcome.point): outcome for outcome in known}
    budget = TimingBudget(seconds=seconds, min_steps=3, max_steps=100_000, precision=0.0)
    for point in space.points():
        if key(point) in measured:
            continue
        with Runner(work.settings(), lambda event: None) as runner:
            runner.load()
            outcome = run_trial(runner, point, space.recipe(point), seed=0, budget=budget)
        measured[key(point)] = outcome
        save([*measured.values()])
        rate = f"{outcome.rate:.0f} samples/s" if outcome.rate else outcome.status.value
        print(f"    {describe(point)}: {rate}", flush=True)
    return [measured[key(point)] for point in space.points()]


def timed(outcome: Outcome) -> float:
    """The seconds that a recipe of the grid was timed for: its steps may be long."""
    measured = outcome.measurement
    return measured.steps * measured.step_seconds if measured is not None else 0.0


def describe(point: Point) -> str:
    """A point in a line."""
    return " ".join(f"{name}={value}" for name, value in point.items())


def read_curves(path: Path, space: Space, head: Mapping[str, Any]) -> list[Outcome]:
    """What was recorded before on this device and software of this space's points.

    A knob that a record does not know was at its first level then.
    """
    if not path.exists():
        return []
    kept = json.loads(path.read_text(encoding="utf-8"))
    same = head.keys() - {"date", "commit"}
    if any(kept.get(name) != head[name] for name in same):
        return []
    defaults = {name: levels[0] for name, levels in space.knobs.items()}
    outcomes = [from_plain(Outcome, item) for item in kept["grid"]]
    return [replace(o, point={**defaults, **o.point}) for o in outcomes]


def writer(path: Path, head: Mapping[str, Any]) -> Save:
    """Keeps a grid in a file: what replays and the cost model's tests read."""

    def write(grid: Sequence[Outcome]) -> None:
        plain = [to_plain(outcome) for outcome in grid]
        lines = ",\n".join(f"  {json.dumps(item)}" for item in plain)
        write_text(path, json.dumps(head)[:-1] + f', "grid": [\n{lines}\n]}}\n')

    return write


def tune_from_scratch(
    path: Path, folder: Path, seed: int, device: str = "cpu", **settings: Any
) -> tuple[Profile, Clock]:
    """One tuning with a study of its own; with the seconds of its stages.

    `settings` are further options, or others than the oracle's.
    """
    clock = Clock()
    asked: dict[str, Any] = {"extras": False, "knobs": KNOBS, **settings}
    profile = tune(
        path,
        device=device,
        listener=clock,
        storage=str(folder / f"study{seed}.journal"),
        output=folder / f"profile{seed}.yaml",
        seed=seed,
        **asked,
    )
    return profile, clock


def record_grid(name: str, head: dict[str, Any], seconds: float, wide: bool) -> None:
    """Measure a task's grid and keep it, where it was not recorded before."""
    curves = CURVES / head["family"] / (f"{name}-wide.json" if wide else f"{name}.json")
    with tempfile.TemporaryDirectory() as temporary:
        work, space = make_work(TASKS / f"{name}.py", Path(temporary), wide)
        known = read_curves(curves, space, head)
        save = writer(curves, {**head, "task": name, "seconds": seconds})
        measure_grid(work, space, seconds, known, save)


def run_task(name: str, head: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Grid, tuning with two seeds, and the alternation between what each chose."""
    path, curves = TASKS / f"{name}.py", CURVES / head["family"] / f"{name}.json"
    seconds = arguments.seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        work, space = make_work(path, folder)
        known = [] if arguments.grid_again else read_curves(curves, space, head)
        save = writer(curves, {**head, "task": name, "seconds": seconds})
        grid = measure_grid(work, space, seconds, known, save)
        best = max(grid, key=lambda outcome: outcome.rate)
        profile, clock = tune_from_scratch(path, folder, seed=0)
        other, _ = tune_from_scratch(path, folder, seed=1)
        oracle, baseline = space.recipe(best.point), profile.evidence.baseline
        plain = Recipe(
            batch_size=baseline.batch_size, accumulation_steps=baseline.accumulation_steps
        )
        chosen, second = (replace(p.recipe, forced=False) for p in (profile, other))
        of = {"chosen": chosen, "best": oracle, "float32": plain, "second": second}
        ratios = compare(work, of, peaks_of(space, grid), arguments)

    return {
        **head,
        "task": name,
        "points": len(grid),
        "failed": sum(o.status is not Status.OK for o in grid),
        "killed": clock.killed,
        "grid_seconds": sum(max(seconds, timed(outcome)) for outcome in grid),
        "recipes": {label: to_plain(recipe) for label, recipe in of.items()},
        **ratios,
        "reason": profile.evidence.reason,
        "stages": clock.seconds,
        "trials": clock.trials,
        "peak_memory_bytes": clock.peak,
    }


def peaks_of(space: Space, grid: Sequence[Outcome]) -> dict[str, int]:
    """Bytes that each recipe of a grid needs, by its key."""
    return {
        space.recipe(o.point).key(): o.measurement.peak_memory_bytes
        for o in grid
        if o.measurement is not None
    }


def compare(
    work: Work, of: Mapping[str, Recipe], peaks: Mapping[str, int], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The last alternation: the ratios that a row reports."""
    watched = (of["chosen"], of["best"], of["second"])
    sharpness = Sharpness(watched, arguments.precision, arguments.limit)
    rates = alternate(work, [*of.values()], peaks, arguments.rounds, sharpness)

    def ratio(left: str, right: str) -> Any:
        return to_plain(paired_ratio(rates[of[left].key()], rates[of[right].key()]))

    return {
        "chosen_over_best": ratio("chosen", "best"),
        "chosen_over_float32": ratio("chosen", "float32"),
        "best_over_float32": ratio("best", "float32"),
        "second_over_chosen": ratio("second", "chosen"),
    }


def compare_again(result: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """A row with the last alternation of its recipes anew; nothing is tuned."""
    name = result["task"]
    of = {label: from_plain(Recipe, plain) for label, plain in result["recipes"].items()}
    with tempfile.TemporaryDirectory() as temporary:
        work, space = make_work(TASKS / f"{name}.py", Path(temporary))
        grid = read_curves(CURVES / result["family"] / f"{name}.json", space, {})
        ratios = compare(work, of, peaks_of(space, grid), arguments)
    limit = f"the last alternation was measured once more, for up to {arguments.limit:.0f} s"
    return {**result, **ratios, "note": limit}


HEAD = (
    "task         chosen/best (95 %)     chosen/float32  best/float32  search/grid  trials"
    "    search contests  proof  seeds  chosen"
)

#: The stages that choose: trials, and whatever runs in alternation.
CHOOSING = ("search", "heats", "finish")


def share(result: Mapping[str, Any]) -> float:
    """The time of all that chooses over the grid's; only preflight and proof are left out."""
    seconds = sum(float(result["stages"].get(stage, 0.0)) for stage in CHOOSING)
    return max(seconds, 1e-3) / float(result["grid_seconds"])


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    best, over = Ratio(**result["chosen_over_best"]), Ratio(**result["chosen_over_float32"])
    stages, recipe = result["stages"], result["recipes"]["chosen"]
    seeds = abs(math.log(result["second_over_chosen"]["ratio"]))
    proof = stages.get("proof", 0.0) + stages.get("islands", 0.0)
    contests = stages.get("heats", 0.0) + stages.get("finish", 0.0)
    return (
        f"{result['task']:12s} {best.ratio:5.3f} ({best.low:.3f}-{best.high:.3f})"
        f" {over.ratio:14.2f}x {result['best_over_float32']['ratio']:12.2f}x {share(result):12.1%}"
        f" {result['trials']:3d} of {result['points']:2d} {stages.get('search', 0.0):7.0f} s"
        f" {contests:6.0f} s"
        f" {proof:5.0f} s {seeds:6.1%}  {recipe['policy']} {recipe['batch_size']}"
    )


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def summary(results: Sequence[dict[str, Any]]) -> str:
    """The table's last lines: geometric means and the worst of each."""
    ratios = [result["chosen_over_best"]["ratio"] for result in results]
    over = [result["chosen_over_float32"]["ratio"] for result in results]
    best = [result["best_over_float32"]["ratio"] for result in results]
    kept = [a / b for a, b in zip(over, best, strict=True)]
    return (
        f"geometric means: chosen/best {geometric_mean(ratios):.3f} (worst {min(ratios):.3f}), "
        f"chosen/float32 {geometric_mean(over):.2f}x of {geometric_mean(best):.2f}x "
        f"({geometric_mean(kept):.3f} of it), "
        f"search/grid {geometric_mean([share(result) for result in results]):.1%}"
    )


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(path.stem for path in TASKS.glob("*.py"))
    parser.add_argument("--tasks", nargs="+", default=known, choices=known)
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps for each recipe")
    parser.add_argument("--rounds", type=int, default=24, help="of the last alternation, at least")
    parser.add_argument(
        "--precision",
        type=float,
        default=Sharpness.width,
        help="width that the intervals of chosen/best and of the seeds shall reach",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=Sharpness.seconds,
        help="seconds of the last alternation after which it ends anyway",
    )
    parser.add_argument("--grid-again", action="store_true", help="measure recorded grids anew")
    parser.add_argument(
        "--grids-only", action="store_true", help="record the grids that are missing; tune nothing"
    )
    parser.add_argument(
        "--wide", action="store_true", help="with --grids-only: with every plausible further knob"
    )
    parser.add_argument(
        "--compare-again",
        type=Path,
        help="a result: its rows of these tasks with the last alternation anew; tunes nothing",
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    head = machine()
    output = arguments.output or RESULTS / f"oracle-{head['date']}-{head['family']}.jsonl"
    if arguments.grids_only:
        for name in arguments.tasks:
            print(name, flush=True)
            record_grid(name, head, arguments.seconds, arguments.wide)
        return
    again = arguments.compare_again
    before = [json.loads(line) for line in again.read_text().splitlines()] if again else []
    results = {result["task"]: result for result in before}
    for name in arguments.tasks:
        print(name, flush=True)
        if again and name not in results:
            parser.error(f"{again} has no result of {name}")
        known = results.get(name)
        results[name] = (
            compare_again(known, arguments) if known else run_task(name, head, arguments)
        )
        write_text(output, "".join(f"{json.dumps(result)}\n" for result in results.values()))
        print(row(results[name]), flush=True)
    found = list(results.values())
    print("", HEAD, *(row(result) for result in found), summary(found), sep="\n")


if __name__ == "__main__":
    main()
