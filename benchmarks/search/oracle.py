"""How near the tuner comes to an exhaustive search, and at what share of its cost.

For every task: the grid (`grids`), whose five fastest recipes are measured once more in fresh
processes, in alternation, before one is called the best; then `autoprec tune` from scratch, as the
README says it is run, with two seeds; then the chosen recipe, the grid's best, float32 as it was
run and float32 with all else as chosen in alternation. A grid is measured by the commit that is
judged: what was recorded before counts only where the commit is the same. Prints a table per task
with the geometric means, and writes every number as JSON lines. What was tuned is kept beside them
until its last alternation is through; where that fails, `--compare-again` makes up for it:

    python -m benchmarks.search.oracle --tasks mlp conv --seconds 3
    python -m benchmarks.search.oracle --tasks conv --compare-again FOLDER/unfinished-NAME.jsonl
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from autoprec.api import tune
from autoprec.core.codec import from_plain, to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Status
from autoprec.tuning.events import Event, Finished, Stage, TrialFinished
from autoprec.tuning.job import TuningJob
from autoprec.tuning.race.sessions import FinalistFailed
from autoprec.yaml_files import write_text
from benchmarks.checkout import CURVES, RESULTS, TASKS
from benchmarks.interleaving import Sharpness, alternate
from benchmarks.provenance import lines_of, machine
from benchmarks.search.grids import (
    FASTEST,
    KNOBS,
    Grid,
    commit_of,
    further_knobs,
    make_job,
    measure_grid,
    peaks_of,
    read_curves,
    timed,
    writer,
)
from benchmarks.search.oracle_rows import HEAD, row, summary

#: Failures of recipes, all together, after which a last alternation is given up: a recipe that ran
#: may fail later, since the memory that it needs is not the same in every process.
RETRIES = 3


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


def tune_from_scratch(
    path: Path, folder: Path, seed: int, device: str = "cpu", **settings: Any
) -> tuple[Profile, Clock]:
    """One tuning with a study of its own; with the seconds of its stages."""
    clock = Clock()
    profile = tune(
        path,
        device=device,
        listener=clock,
        storage=str(folder / f"study{seed}.journal"),
        output=folder / f"profile{seed}.yaml",
        seed=seed,
        **settings,
    )
    return profile, clock


def grid_of(
    name: str, head: Mapping[str, Any], arguments: argparse.Namespace, job: TuningJob, space: Space
) -> tuple[Grid, str | None]:
    """A task's grid, and the commit that measured what was recorded of it before, if any was."""
    whole = arguments.whole_grid
    curves = arguments.curves / head["family"] / (f"{name}-wide.json" if whole else f"{name}.json")
    known = read_curves(curves, space, head, arguments.recorded_grids)
    recorded = commit_of(curves) if known else head["commit"]
    told = {**head, "commit": recorded, "task": name, "seconds": arguments.seconds}
    save = writer(curves, told, () if whole else further_knobs(space))
    return measure_grid(job, space, arguments.seconds, known, save, whole), recorded


def record_grid(name: str, head: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Measure a task's grid and keep it, where it was not recorded before."""
    with tempfile.TemporaryDirectory() as temporary:
        job, space = make_job(TASKS / f"{name}.py", Path(temporary), wide=True)
        grid_of(name, head, arguments, job, space)


def best_of(
    job: TuningJob, space: Space, grid: Grid, rounds: int
) -> tuple[Recipe, list[dict[str, Any]]]:
    """The best of a grid: of its fastest, measured once more in fresh processes, in alternation.

    What is fastest of many timings is partly lucky, and luck does not come twice.
    """
    fastest = {space.recipe(o.point).key(): o for o in grid.fastest()}
    recipes = [space.recipe(outcome.point) for outcome in fastest.values()]
    rates = alternate(job, recipes, peaks_of(space, grid.outcomes), rounds)
    rows = [
        {
            "recipe": to_plain(recipe),
            "in_the_grid": fastest[recipe.key()].rate,
            "again": median(rates[recipe.key()]),
        }
        for recipe in recipes
    ]
    return max(recipes, key=lambda recipe: median(rates[recipe.key()])), rows


def tune_task(name: str, head: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Grid, and tuning with two seeds: a row without the ratios of its last alternation."""
    path, seconds = TASKS / f"{name}.py", arguments.seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        job, space = make_job(path, folder, wide=True)
        grid, recorded = grid_of(name, head, arguments, job, space)
        best, again = best_of(job, space, grid, arguments.rounds_of_fastest)
        began = time.monotonic()
        profile, clock = tune_from_scratch(path, folder, seed=0)
        tuning_seconds = time.monotonic() - began
        other, _ = tune_from_scratch(path, folder, seed=1)
    of, peaks = recipes_of(profile, other, best), peaks_of(space, grid.outcomes)

    return {
        **head,
        "task": name,
        "points": len(grid.outcomes),
        "failed": sum(o.status is not Status.OK for o in grid.outcomes),
        "killed": clock.killed,
        "seconds": seconds,
        "grid_commit": recorded,
        "grid_seconds": sum(max(seconds, timed(outcome)) for outcome in grid.outcomes),
        "grid_wall_seconds": grid.seconds,
        "grid_knobs": [*KNOBS],
        "knobs_of_the_fastest": [] if arguments.whole_grid else [*further_knobs(space)],
        "fastest": again,
        "recipes": {label: to_plain(recipe) for label, recipe in of.items()},
        "peaks": {label: peaks.get(recipe.key()) for label, recipe in of.items()},
        "reason": profile.evidence.reason,
        "inconclusive": profile.evidence.inconclusive,
        "stages": clock.seconds,
        "tuning_seconds": tuning_seconds,
        "trials": clock.trials,
        "peak_memory_bytes": clock.peak,
    }


def recipes_of(profile: Profile, other: Profile, best: Recipe) -> dict[str, Recipe]:
    """What is compared in the end, by label; `other` is the tuning with the second seed."""
    baseline = profile.evidence.baseline
    plain = Recipe(batch_size=baseline.batch_size, accumulation_steps=baseline.accumulation_steps)
    chosen, second = (replace(p.recipe, forced=False) for p in (profile, other))
    return {
        "chosen": chosen,
        "best": best,
        "float32": plain,
        "float32_alike": in_float32(chosen),
        "second": second,
    }


def in_float32(recipe: Recipe) -> Recipe:
    """A recipe with nothing changed but its precision, which becomes plain float32."""
    knobs = {name: v for name, v in recipe.knobs.items() if name != "implicit_bfloat16"}
    return replace(recipe.with_policy(Policy.FLOAT32), knobs=knobs)


class Retries:
    """Recipes that failed in an alternation; raises where there are more than it puts up with."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.failed: list[str] = []

    def __call__(self, failed: FinalistFailed) -> None:
        said = f"{describe_recipe(failed.recipe)} failed: {failed}"
        self.failed.append(said)
        print(f"    {said}", flush=True)
        if len(self.failed) > self._allowed:
            raise failed


def compare(result: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """A row with the last alternation of its recipes, in place of an earlier one; tunes nothing."""
    name = result["task"]
    of = {label: from_plain(Recipe, plain) for label, plain in result["recipes"].items()}
    of.setdefault("float32_alike", in_float32(of["chosen"]))
    watched = (of["chosen"], of["best"], of["second"])
    sharpness = Sharpness(watched, arguments.precision, arguments.limit)
    retries = Retries(RETRIES)
    with tempfile.TemporaryDirectory() as temporary:
        job, space = make_job(TASKS / f"{name}.py", Path(temporary), wide=True)
        grid = read_curves(arguments.curves / result["family"] / f"{name}.json", space, {})
        known = {of[label].key(): peak for label, peak in result.get("peaks", {}).items() if peak}
        peaks = {**peaks_of(space, grid), **known}
        rates = alternate(job, [*of.values()], peaks, arguments.rounds, sharpness, retries)

    def ratio(left: str, right: str) -> Any:
        return to_plain(paired_ratio(rates[of[left].key()], rates[of[right].key()]))

    return {
        **result,
        "chosen_over_best": ratio("chosen", "best"),
        "chosen_over_float32": ratio("chosen", "float32"),
        "chosen_over_float32_alike": ratio("chosen", "float32_alike"),
        "best_over_float32": ratio("best", "float32"),
        "second_over_chosen": ratio("second", "chosen"),
        "recipes": {label: to_plain(recipe) for label, recipe in of.items()},
        **notes(result, arguments.limit, retries.failed),
    }


def notes(result: Mapping[str, Any], limit: float, failed: Sequence[str]) -> dict[str, str]:
    """What a reader must know of a last alternation, if anything."""
    said = [f"in the last alternation {each}; it was measured again" for each in failed]
    if "chosen_over_best" in result:
        said.insert(0, f"the last alternation was measured once more, for up to {limit:.0f} s")
    return {"note": "; ".join(said)} if said else {}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(path.stem for path in TASKS.glob("*.py"))
    parser.add_argument("--tasks", nargs="+", default=known, choices=known)
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps for each recipe")
    parser.add_argument("--rounds", type=int, default=24, help="of the last alternation, at least")
    parser.add_argument(
        "--rounds-of-fastest", type=int, default=12, help=f"of the grid's {FASTEST} fastest"
    )
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
    parser.add_argument(
        "--recorded-grids",
        action="store_true",
        help="take grids that another commit recorded; the rows say which",
    )
    parser.add_argument(
        "--whole-grid",
        action="store_true",
        help="the further knobs at every point, not at the fastest only",
    )
    parser.add_argument(
        "--grids-only", action="store_true", help="record the grids that are missing; tune nothing"
    )
    parser.add_argument(
        "--compare-again",
        type=Path,
        help="a result: its rows of these tasks with the last alternation anew; tunes nothing",
    )
    parser.add_argument("--curves", type=Path, default=CURVES, help="where grids are kept")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(words)


def main() -> None:
    """Run, print, and store."""
    arguments = parse()
    head = machine()
    output = arguments.output or RESULTS / f"oracle-{head['date']}-{head['family']}.jsonl"
    if arguments.grids_only:
        for name in arguments.tasks:
            print(name, flush=True)
            record_grid(name, head, arguments)
        return
    again = rows_of(arguments.compare_again)
    results = {name: r for name, r in rows_of(output).items() if r.get("commit") == head["commit"]}
    results |= {name: r for name, r in again.items() if "chosen_over_best" in r}
    waiting = output.with_name(f"unfinished-{output.name}")
    unfinished = rows_of(waiting)
    missing = [name for name in arguments.tasks if again and name not in again]
    if missing:
        raise SystemExit(f"{arguments.compare_again} has no result of {', '.join(missing)}")
    for name in arguments.tasks:
        print(name, flush=True)
        tuned = again.get(name) or tune_task(name, head, arguments)
        write_rows(waiting, unfinished | {name: tuned})
        try:
            results[name] = compare(tuned, arguments)
        except FinalistFailed as failed:
            print(f"    not compared: {failed}; tuned all the same, see {waiting}", flush=True)
            unfinished[name] = tuned
            continue
        unfinished.pop(name, None)
        write_rows(output, results)
        write_rows(waiting, unfinished)
        print(row(results[name]), flush=True)
    found = list(results.values())
    if found:
        print("", HEAD, *(row(result) for result in found), summary(found), sep="\n")
    if unfinished:
        raise SystemExit(f"not compared: {', '.join(unfinished)}; --compare-again {waiting}")


def rows_of(path: Path | None) -> dict[str, dict[str, Any]]:
    """A file's rows by their task; none where there is no file."""
    rows = lines_of(path) if path is not None and path.exists() else []
    return {row["task"]: row for row in rows}


def write_rows(path: Path, rows: Mapping[str, Any]) -> None:
    """Rows as JSON lines; no file where there are none."""
    if rows:
        write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows.values()))
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
