"""How near the tuner comes to an exhaustive search, and at what share of its cost.

For every task: the whole grid, each recipe in a fresh process; then `autoprec tune` from scratch;
then the chosen recipe, the grid's best and the float32 baseline in alternation. Prints a table per
task with the geometric means, and writes every number as JSON lines.

    python benchmarks/oracle.py --tasks mlp conv --seconds 3
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autoprec.api import probe, tune
from autoprec.backends.products import measure_products
from autoprec.core.codec import to_plain
from autoprec.core.measurement import TimingBudget
from autoprec.core.recipe import Recipe
from autoprec.core.rules import propose
from autoprec.core.search import Outcome, Status
from autoprec.core.space import Space
from autoprec.core.statistics import Ratio, paired_ratio
from autoprec.tuning.contest import Contest
from autoprec.tuning.events import Event, Finished, Stage, TrialFinished
from autoprec.tuning.neighbours import Watch
from autoprec.tuning.options import Options
from autoprec.tuning.preflight import build_space, preflight
from autoprec.tuning.study import Study
from autoprec.tuning.trials import Runner, run_trial
from autoprec.tuning.work import Place, Work

TASKS = Path(__file__).parent / "tasks"
RESULTS = Path(__file__).parent / "results"


class Clock:
    """Times the tuner's stages from its events."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.trials = 0
        self._stage, self._since = "start", time.monotonic()

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrialFinished):
            self.trials += 1
        if isinstance(event, Stage | Finished):
            now = time.monotonic()
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
            self._stage = event.name if isinstance(event, Stage) else "end"
            self._since = now


def make_work(path: Path, folder: Path) -> tuple[Work, Space]:
    """The work order and the space that the tuner would search for a task."""
    seen = probe(device="cpu")
    names = [framework.name for framework in seen.frameworks]
    facts = measure_products(seen.devices[0].facts, names)
    place = Place(facts, {}, lambda known: known)
    work = Work(path, place, Options(storage=str(folder / "preflight.journal")), lambda event: None)
    with work.runner() as runner:
        study = Study(work.options.storage or "", "preflight")
        task = preflight(work, study, runner)
    return work, build_space(work, task, facts, propose(facts))


def measure_grid(work: Work, space: Space, seconds: float) -> list[tuple[Outcome, float]]:
    """Every recipe of the space in a process of its own; with the seconds of its steps."""
    found = []
    for point in space.points():
        recipe = space.recipe(point)
        with Runner(work.settings(), lambda event: None) as runner:
            runner.load()
            budget = TimingBudget(seconds=seconds, min_steps=3, max_steps=100_000, precision=0.0)
            began = time.monotonic()
            outcome = run_trial(runner, point, recipe, seed=0, budget=budget)
            found.append((outcome, time.monotonic() - began))
        rate = f"{outcome.rate:.0f} samples/s" if outcome.rate else outcome.status.value
        print(f"    {dict(point)}: {rate}", flush=True)
    return found


def alternate(work: Work, recipes: Sequence[Recipe], rounds: int) -> list[list[float]]:
    """Rates of the recipes in alternating rounds."""
    contest = Contest(
        recipes,
        work.runner,
        seed=0,
        together=True,
        listener=lambda event: None,
        watch=Watch(print),
    )
    with contest:
        finals = contest.run(rounds, [0.1] * len(recipes))
    return [list(final.rates) for final in finals]


def run_task(name: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Grid, tuning, and the alternation between what each chose."""
    path = TASKS / f"{name}.py"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        work, space = make_work(path, folder)
        grid = measure_grid(work, space, seconds)
        best = max((outcome for outcome, _ in grid), key=lambda outcome: outcome.rate)
        clock = Clock()
        profile = tune(
            path,
            device="cpu",
            listener=clock,
            storage=str(folder / "study.journal"),
            output=folder / "profile.yaml",
        )
        chosen, oracle = profile.recipe, space.recipe(best.point)
        plain = Recipe(
            batch_size=profile.evidence.baseline.batch_size,
            accumulation_steps=profile.evidence.baseline.accumulation_steps,
        )
        rates = alternate(work, [chosen, oracle, plain], rounds)
    ratio = paired_ratio(rates[0], rates[1])
    over = paired_ratio(rates[0], rates[2])
    potential = paired_ratio(rates[1], rates[2])
    search = clock.seconds.get("search", 0.0)
    return {
        "task": name,
        "grid": [
            {"point": dict(o.point), "status": o.status, "rate": o.rate, "seconds": s}
            for o, s in grid
        ],
        "points": len(grid),
        "grid_seconds": len(grid) * seconds,
        "chosen": to_plain(chosen),
        "oracle": to_plain(oracle),
        "chosen_over_best": to_plain(ratio),
        "chosen_over_float32": to_plain(over),
        "best_over_float32": to_plain(potential),
        "search_seconds": search,
        "stages": clock.seconds,
        "trials": clock.trials,
        "failed": sum(o.status is not Status.OK for o, _ in grid),
    }


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    best, over = Ratio(**result["chosen_over_best"]), Ratio(**result["chosen_over_float32"])
    share = result["search_seconds"] / result["grid_seconds"]
    return (
        f"{result['task']:12s} {best.ratio:6.3f} ({best.low:.3f}-{best.high:.3f})"
        f"  {over.ratio:6.2f}x  {share:7.1%}  {result['trials']:3d} of {result['points']:3d}"
    )


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(path.stem for path in TASKS.glob("*.py"))
    parser.add_argument("--tasks", nargs="+", default=known, choices=known)
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps for each recipe")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    facts = probe(device="cpu").devices[0].facts
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    output = arguments.output or RESULTS / f"oracle-{day}.jsonl"
    head = {"date": day, "device": facts.name, "family": facts.family}
    head |= {"python": platform.python_version()}
    head |= {f.name: f.version for f in probe().frameworks}
    results = []
    output.write_text("")
    for name in arguments.tasks:
        print(name, flush=True)
        result = run_task(name, arguments.seconds, arguments.rounds)
        results.append(result)
        with output.open("a") as file:
            file.write(json.dumps({**head, **result}) + "\n")
        print(row(result), flush=True)
    print("\ntask         chosen/best             chosen/float32  search/grid  trials")
    for result in results:
        print(row(result))
    ratios = [result["chosen_over_best"]["ratio"] for result in results]
    shares = [max(r["search_seconds"], 1e-3) / r["grid_seconds"] for r in results]
    print(f"geometric mean {geometric_mean(ratios):.3f}; search/grid {geometric_mean(shares):.1%}")


if __name__ == "__main__":
    main()
