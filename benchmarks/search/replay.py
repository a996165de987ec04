"""Run a sampler against recorded grids, with noise, in milliseconds: no model is trained.

Every file of benchmarks/curves/MACHINE/ is an exhaustive grid of one task. A replay answers each
trial from it with noise of the size that trials have, then chooses among the finalists as the tuner
does, with the lesser noise of alternating rounds. Regret is how much slower the choice truly is
than the grid's best.

    python -m benchmarks.search.replay --sampler cost tpe random --output results/replay-DATE.json
    python -m benchmarks.search.replay --sampler tpe random --seeds 50
    python -m benchmarks.search.replay --disturbed 0.25

The last is a machine that is a quarter slower in one trial of four, as shared ones are.

The grids of gpt were recorded when padding to 2 was tried on CPUs. They are replayed as they were
recorded, with twice the points that a tuning there has now.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoprec.core.codec import from_plain
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import KEEP_MEMORY, Alignment, KnobValue
from autoprec.core.speed.acquisition import Next, next_point
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.keep_memory import clearly_pays
from autoprec.core.speed.noise import seems_disturbed
from autoprec.core.speed.space import BATCH, Point, Space, point_key
from autoprec.core.speed.stopping import Limits, Stop
from autoprec.core.speed.trial_results import Outcome, possibly_disturbed, shortlist
from benchmarks.checkout import CURVES
from benchmarks.provenance import commit, today

SAMPLERS = ("cost", "random", "tpe")
NOISE, FINAL_NOISE = 0.03, 0.01
DISTURBED = 4 / 3
FINALISTS = 4

#: What a trial costs besides its steps, and how long it times: the tuner's own figures.
SETUP, TIMED, STEPS = 0.5, 0.5, 4
_OWN = ("policy", "memory_format", "compile", "alignment", BATCH)


@dataclass(frozen=True)
class Grid:
    """A recorded grid: the space it covers and what was measured at every point."""

    name: str
    space: Space
    outcomes: Mapping[tuple[tuple[str, object], ...], Outcome]
    seconds: float

    @property
    def best(self) -> float:
        """Samples per second of the grid's best point."""
        return max(outcome.rate for outcome in self.outcomes.values())

    @property
    def baseline(self) -> Point:
        """Plain float32 at batch 32, or the smallest there is."""
        levels = self.space.levels()
        sizes = self.space.batch_sizes
        plain = {name: values[0] for name, values in levels.items()}
        return {**plain, "policy": "float32", BATCH: 32 if 32 in sizes else sizes[0]}


def read_grids(folder: Path = CURVES) -> Iterator[Grid]:
    """Every recorded grid."""
    for path in sorted(folder.glob("*/*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        outcomes = [from_plain(Outcome, item) for item in kept["grid"]]
        found = {point_key(outcome.point): outcome for outcome in outcomes}
        space = space_of([outcome.point for outcome in outcomes])
        yield Grid(f"{path.parent.name}/{path.stem}", space, found, kept["seconds"])


def space_of(points: Sequence[Point]) -> Space:
    """The space whose points these are, its levels in the order in which they come."""

    def levels(name: str) -> tuple[KnobValue, ...]:
        return tuple(dict.fromkeys(point[name] for point in points if name in point))

    return Space(
        policies=tuple(Policy(str(name)) for name in levels("policy")),
        batch_sizes=tuple(sorted(int(size) for size in levels(BATCH))),
        memory_formats=tuple(str(name) for name in levels("memory_format")),
        compile=tuple(bool(value) for value in levels("compile")),
        alignments=tuple(Alignment(int(value)) for value in levels("alignment")) or (Alignment(),),
        knobs={name: levels(name) for name in points[0] if name not in _OWN},
        batch_share=SPEED.most_share,  # regret is of the most samples a second
    )


def noisy(outcome: Outcome, draw: random.Random, noise: float) -> Outcome:
    """The outcome as a trial would see it."""
    measured = outcome.measurement
    if measured is None:
        return outcome
    seconds = measured.step_seconds * math.exp(draw.gauss(0.0, noise))
    seen = replace(
        measured, step_seconds=seconds, low=seconds * (1 - noise), high=seconds * (1 + noise)
    )
    return replace(outcome, measurement=seen)


def slower(outcome: Outcome) -> Outcome:
    """The outcome as a trial would see it while something else uses the machine."""
    measured = outcome.measurement
    if measured is None:
        return outcome
    steps = {n: DISTURBED * getattr(measured, n) for n in ("step_seconds", "low", "high")}
    return replace(outcome, measurement=replace(measured, **steps))


Ask = Callable[[Grid, Sequence[Outcome]], Next | None]


def by_cost(grid: Grid, limits: Limits) -> Ask:
    """autoprec's own search, and what the finish measures besides."""

    def ask(grid: Grid, history: Sequence[Outcome]) -> Next | None:
        decision = next_point(grid.space, grid.baseline, history, limits)
        return giving_back(grid, history) if isinstance(decision, Stop) else decision

    return ask


def giving_back(grid: Grid, history: Sequence[Outcome]) -> Next | None:
    """The fastest recipe without kept memory, where there is doubt whether that pays.

    The baseline itself runs in every finish.
    """
    others = [
        outcome for outcome in history if point_key(outcome.point) != point_key(grid.baseline)
    ]
    if not others:
        return None
    fastest = max(others, key=lambda outcome: outcome.rate).point
    pays = clearly_pays(grid.space, grid.baseline, history, int(fastest[BATCH]))
    if pays or not fastest.get(KEEP_MEMORY):
        return None
    twin = {**fastest, KEEP_MEMORY: False}
    tried = point_key(twin) in {point_key(outcome.point) for outcome in history}
    return None if tried else Next(twin, "the winner without its freed memory kept")


def by_optuna(grid: Grid, name: str, seed: int, count: int) -> Ask:
    """One of Optuna's samplers, told every trial, for `count` different points."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    samplers: dict[str, Any] = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, n_startup_trials=6),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
    }
    study = optuna.create_study(direction="maximize", sampler=samplers[name]())
    spread = {
        each: optuna.distributions.CategoricalDistribution(levels)
        for each, levels in grid.space.levels().items()
    }
    open_trials: list[Any] = []

    def ask(grid: Grid, history: Sequence[Outcome]) -> Next | None:
        if history:
            study.tell(open_trials[-1], history[-1].rate)
        if len(history) >= count:
            return None
        known = {point_key(outcome.point): outcome for outcome in history}
        if not history:
            study.enqueue_trial(dict(grid.baseline))
        for _ in range(20 * count):
            trial = study.ask(spread)
            open_trials.append(trial)
            if point_key(trial.params) not in known:
                return Next(dict(trial.params), name)
            study.tell(trial, known[point_key(trial.params)].rate)
        return None

    return ask


def replay(grid: Grid, ask: Ask, seed: int, disturbed: float = 0.0) -> tuple[float, int, float]:
    """One search: its regret, its trials, and the seconds that its trials would have taken.

    `seems_disturbed` is the share of the trials whose steps take a third longer.
    """
    draw = random.Random(seed)
    history: list[Outcome] = []
    seconds = 0.0

    def look(true: Outcome) -> Outcome:
        seen = noisy(true, draw, NOISE)
        return slower(seen) if disturbed and draw.random() < disturbed else seen

    while (decision := ask(grid, history)) is not None:
        assert decision.point is not None
        true = grid.outcomes[point_key(decision.point)]
        seen = look(true)
        seconds += SETUP + trial_seconds(true.measurement)
        foreseen = decision.expected_rate
        if seen.rate and foreseen and seems_disturbed(1 / seen.rate, 1 / foreseen):
            seen = look(true)
            seconds += trial_seconds(true.measurement)
        history.append(seen)
    last = (*shortlist(history, grid.space, count=FINALISTS), *possibly_disturbed(history)[:1])
    finalists = [grid.outcomes[point_key(o.point)] for o in last]
    chosen = max(finalists, key=lambda o: noisy(o, draw, FINAL_NOISE).rate)
    return 1 - chosen.rate / grid.best, len(history), seconds


def trial_seconds(measured: Measurement | None) -> float:
    """How long a trial runs steps, its warm-up included."""
    return TIMED if measured is None else max(TIMED, STEPS * measured.step_seconds)


def run(grid: Grid, sampler: str, seeds: int, disturbed: float = 0.0) -> dict[str, Any]:
    """Replays with different noise; the means."""
    began = time.perf_counter()
    found = []
    for seed in range(seeds):
        if sampler == "cost":
            ask = by_cost(grid, Limits())
        else:
            ask = by_optuna(grid, sampler, seed, max(2, len(grid.outcomes) // 4))
        found.append(replay(grid, ask, seed, disturbed))
    regrets, trials, seconds = zip(*found, strict=True)
    points = len(grid.outcomes)
    return {
        "grid": grid.name,
        "sampler": sampler,
        "points": points,
        "mean_regret": sum(regrets) / seeds,
        "worst_regret": max(regrets),
        "mean_trials": sum(trials) / seeds,
        "most_trials": max(trials),
        "share_of_points": sum(trials) / seeds / points,
        "share_of_time": sum(seconds) / seeds / (points * grid.seconds),
        "milliseconds": 1e3 * (time.perf_counter() - began) / seeds,
    }


def main() -> None:
    """Replay, print a table, and store it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sampler", nargs="+", default=["cost"], choices=SAMPLERS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--disturbed", type=float, default=0.0, help="share of trials")
    parser.add_argument("--grids", nargs="+", help="files in benchmarks/curves/, as MACHINE/TASK")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    grids = [g for g in read_grids() if not arguments.grids or g.name in arguments.grids]
    rows = []
    head = ("grid", "sampler", "points", "regret", "worst", "trials", "of points", "of time", "ms")
    print("{:22s} {:7s} {:>6s} {:>7s} {:>7s} {:>7s} {:>9s} {:>8s} {:>7s}".format(*head))
    for sampler in arguments.sampler:
        for grid in grids:
            row = run(grid, sampler, arguments.seeds, arguments.disturbed)
            rows.append(row)
            print(
                f"{row['grid']:22s} {sampler:7s} {row['points']:6d} {row['mean_regret']:7.1%} "
                f"{row['worst_regret']:7.1%} {row['mean_trials']:7.1f} "
                f"{row['share_of_points']:9.0%} {row['share_of_time']:8.0%} "
                f"{row['milliseconds']:7.0f}",
                flush=True,
            )
        own = [row for row in rows if row["sampler"] == sampler]
        mean = sum(row["mean_regret"] for row in own) / len(own)
        share = math.exp(sum(math.log(row["share_of_time"]) for row in own) / len(own))
        print(f"{sampler}: mean regret {mean:.2%}, {share:.0%} of the grids' time (geometric mean)")
    if arguments.output:
        found = {
            "date": today(),
            "commit": commit(),
            "seeds": arguments.seeds,
            "disturbed": arguments.disturbed,
            "rows": rows,
        }
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
