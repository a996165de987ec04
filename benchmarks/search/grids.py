"""The exhaustive side of the oracle: what is in a grid, how it is measured, and what is kept of it.

A grid holds every policy, batch, layout, compilation and whether freed memory is kept, each recipe
in a fresh process. The further knobs that the tuner tries (fused optimizer, fewer threads, ...) are
measured in all their combinations at the grid's fastest recipes only, unless the whole product is
asked for: it is up to eight times as large.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from autoprec.api import probe
from autoprec.backends.shared import matmul_timing
from autoprec.core.codec import from_plain, to_plain
from autoprec.core.device.merging import with_measurements
from autoprec.core.device.policies import propose
from autoprec.core.recipe import KEEP_MEMORY, KnobValue
from autoprec.core.recipe_words import describe_recipe
from autoprec.core.speed.space import Point, Space, point_key
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.speed.trial_results import Outcome
from autoprec.tuning.flow.preflight import describe_once
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.search.task_space import build_space
from autoprec.tuning.study.study import Study
from autoprec.workers.runner import Runner, run_trial
from autoprec.workers.task_source import TaskSource
from autoprec.yaml_files import write_text
from benchmarks.provenance import DIRTY, UNKNOWN

#: Tried at every point of a grid, besides policy, batch, layout and XLA.
KNOBS: Mapping[str, tuple[KnobValue, ...]] = {KEEP_MEMORY: (False, True)}

#: How many of the fastest recipes get the further knobs, and are measured once more in the end.
FASTEST = 5

Save = Callable[[Sequence[Outcome]], None]


@dataclass(frozen=True)
class Grid:
    """What was measured of a space, and the seconds that took with the start of its processes.

    None where a part of it was known before: then the rest's seconds are not the grid's.
    """

    outcomes: tuple[Outcome, ...]
    seconds: float | None = None

    def fastest(self, count: int = FASTEST) -> list[Outcome]:
        """The fastest recipes, the fastest first."""
        ran = [outcome for outcome in self.outcomes if outcome.rate > 0]
        return sorted(ran, key=lambda outcome: -outcome.rate)[:count]


def make_job(path: Path, folder: Path, wide: bool = False) -> tuple[TuningJob, Space]:
    """The work order and the space that the tuner would search for a task.

    `wide` takes in the further knobs, as `autoprec tune` does.
    """
    seen = probe(device="cpu")
    facts, names = seen.devices[0].facts, [framework.name for framework in seen.frameworks]
    facts = with_measurements(facts, matmul_timing.measure(facts, names))
    target = Target(facts, {}, lambda known, _: known)
    job = TuningJob(
        TaskSource(path),
        target,
        Options(storage=str(folder / "preflight.journal"), extras=wide, knobs=KNOBS),
        lambda event: None,
    )
    with job.runner() as runner:
        study = Study(job.options.storage or "", "preflight")
        task = describe_once(job, study, runner)
    return job, build_space(job, task, facts, propose(facts))


def further_knobs(space: Space) -> tuple[str, ...]:
    """The knobs of a wide space that are not tried at every point of the grid."""
    return tuple(name for name in space.knobs if name not in KNOBS)


def points_of(space: Space, whole: bool) -> list[Point]:
    """The points of a wide space that are measured first: all, or those without further knobs."""
    further = () if whole else further_knobs(space)
    return [p for p in space.points() if all(p[name] == space.knobs[name][0] for name in further)]


def refined(space: Space, fastest: Sequence[Point]) -> list[Point]:
    """These points with every combination of the further knobs, each point once."""
    names = further_knobs(space)
    levels = [space.knobs[name] for name in names]
    found = {
        point_key(point): point
        for start in fastest
        for chosen in product(*levels)
        for point in ({**start, **dict(zip(names, chosen, strict=True))},)
    }
    return list(found.values())


def measure_grid(
    job: TuningJob,
    space: Space,
    seconds: float,
    known: Sequence[Outcome],
    save: Save,
    whole: bool = False,
) -> Grid:
    """Every recipe in a process of its own, `seconds` of steps each, then the fastest refined.

    What is `known` is not measured again, and then the grid's seconds are not known. `save` is told
    of all there is of the first part after each recipe: that is a whole product, which can be
    replayed.
    """
    measured = {point_key(outcome.point): outcome for outcome in known}
    budget = TimingBudget(seconds=seconds, min_steps=3, max_steps=100_000, precision=0.0)
    began = time.monotonic()

    def measure(points: Sequence[Point], save: Save) -> Grid:
        for point in points:
            if point_key(point) not in measured:
                measured[point_key(point)] = _apart(job, space, point, budget)
                save([*measured.values()])
        seconds = None if known else time.monotonic() - began
        return Grid(tuple(measured[point_key(p)] for p in points), seconds)

    first = points_of(space, whole)
    grid = measure(first, save)
    if whole:
        return grid
    more = refined(space, [outcome.point for outcome in grid.fastest()])
    points = {point_key(point): point for point in (*first, *more)}
    return measure(list(points.values()), lambda outcomes: None)


def _apart(job: TuningJob, space: Space, point: Point, budget: TimingBudget) -> Outcome:
    with Runner(job.settings(), job.on_progress) as runner:
        runner.load()
        outcome = run_trial(runner, point, space.recipe(point), seed=0, budget=budget)
    rate = f"{outcome.rate:.0f} samples/s" if outcome.rate else outcome.status.value
    print(f"    {describe_recipe(space.recipe(point))}: {rate}", flush=True)
    return outcome


def timed(outcome: Outcome) -> float:
    """The seconds that a recipe of the grid was timed for: its steps may be long."""
    measured = outcome.measurement
    return measured.steps * measured.step_seconds if measured is not None else 0.0


def peaks_of(space: Space, grid: Sequence[Outcome]) -> dict[str, int]:
    """Bytes that each recipe of a grid needs, by its key."""
    return {
        space.recipe(o.point).key(): o.measurement.peak_memory_bytes
        for o in grid
        if o.measurement is not None
    }


def read_curves(
    path: Path, space: Space, head: Mapping[str, Any], any_commit: bool = False
) -> list[Outcome]:
    """What was recorded of this space's points on this device, software and commit.

    With `any_commit` what another commit measured counts, too; without it nothing does where this
    commit's changes are in no commit. A knob that a record does not know was at its first level.
    """
    here = str(head.get("commit", ""))
    if not path.exists() or (not any_commit and (here == UNKNOWN or here.endswith(DIRTY))):
        return []
    kept = json.loads(path.read_text(encoding="utf-8"))
    free = {"date", "commit"} if any_commit else {"date"}
    if any(kept.get(name) != head[name] for name in head.keys() - free):
        return []
    defaults = {name: levels[0] for name, levels in space.knobs.items()}
    outcomes = [from_plain(Outcome, item) for item in kept["grid"]]
    return [replace(o, point={**defaults, **o.point}) for o in outcomes]


def commit_of(path: Path) -> str | None:
    """The commit that measured a recorded grid, where that was kept."""
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8")).get("commit")
    return None if found is None else str(found)


def writer(path: Path, head: Mapping[str, Any], without: Sequence[str] = ()) -> Save:
    """Keeps a grid in a file: what replays and the cost model's tests read.

    `without` are knobs that were at their first level at every point.
    """

    def write(grid: Sequence[Outcome]) -> None:
        plain = [to_plain(replace(o, point=_without(o.point, without))) for o in grid]
        lines = ",\n".join(f"  {json.dumps(item)}" for item in plain)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(head)[:-1] + f', "grid": [\n{lines}\n]}}\n')

    return write


def _without(point: Point, names: Sequence[str]) -> Point:
    return {name: value for name, value in point.items() if name not in names}
