"""What the peers choose on the same tasks, how long they take, and how fast their choices train.

    pip install 'autoprec[peers]'
    python -m benchmarks.peers.compare --tasks mlp gpt

Each searches in a process of its own (`rivals`), under the same memory limit and the same time
limit. A rival is helped to what autoprec may use: its freed memory is kept from its process's start
(environment variables), and of the layouts and of plain or fused optimizers, where autoprec tries
them and the rival does not choose, the faster is taken. Then all train in alternation, measured the
same way. Three numbers come of it for each rival, autoprec's throughput over theirs:

- chosen: everybody's own choice of policy, batch and settings; where autoprec chose nothing, it has
  float32 as it was run;
- fixed: the same with the batch fixed to the task's own, for autoprec's search as well;
- knobs: the rival's policy and batch on both sides, with autoprec's settings over the rival's, and
  so neither policy nor batch. What is left is layout, optimizer, threads, and how memory is kept.

Beside them runs autoprec's choice in plain float32, with all else as it was chosen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.number_words import times
from autoprec.core.recipe import Recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.space import Space
from benchmarks.checkout import RESULTS, TASKS
from benchmarks.peers.entrants import (
    Entrant,
    KeptJob,
    at_batch,
    helped,
    in_plain_float32,
    kept_job,
    rates_of,
    with_knobs_of,
)
from benchmarks.peers.rows import ALIKE, AT_BATCH, CHOSEN, KNOBS, OURS, OURS_AT_THE_BATCH, means
from benchmarks.peers.searches import (
    CHOOSES_LAYOUT,
    RIVALS,
    USERS_BATCH,
    search_apart,
)
from benchmarks.provenance import machine
from benchmarks.search.grids import make_job
from benchmarks.search.oracle_rows import ratio_text, words

Found = dict[str, dict[str, Any]]
Sides = tuple[dict[str, Entrant], dict[str, Entrant]]
"""Autoprec's side of each peer, and the peer's, by the peer's name."""

SIDES = ("ours", "theirs")

#: What is left to a user for whom autoprec chose nothing: float32 as it was run.
FALLBACK = Recipe(batch_size=USERS_BATCH)
UNKNOWN_BYTES = 2**62


def compare(
    task: str, peers: Sequence[str], rounds: int, limit: float, folder: Path
) -> dict[str, Any]:
    """Every search, then the three comparisons."""
    plain_job, space = make_job(TASKS / f"{task}.py", folder, wide=True)
    job = kept_job(plain_job)
    memory = job.memory_bytes or 2**62
    found: Found = {}
    for name in (*peers, OURS, OURS_AT_THE_BATCH):
        found[name] = search_apart(name, task, memory, limit)
        print(f"  {name}: {describe(found[name])}", flush=True)
    own_batch = from_plain(Recipe, found[OURS_AT_THE_BATCH].get("recipe", to_plain(FALLBACK)))
    sides = entrants_of(job, space, found, peers, own_batch.effective_batch)
    rows = time_in_alternation(job, found, sides, rounds)
    return {"task": task, "limit": limit, "peers": found, "comparisons": rows}


def entrants_of(
    job: KeptJob, space: Space, found: Found, peers: Sequence[str], batch: int
) -> dict[str, Sides]:
    """By comparison: who runs."""
    chose = {p: from_plain(Recipe, found[p]["recipe"]) for p in peers if "recipe" in found[p]}
    dressed: dict[str, Recipe] = {}

    def help_to(peer: str, recipe: Recipe) -> Entrant:
        key = f"{peer in CHOOSES_LAYOUT}{recipe.key()}"
        if key not in dressed:
            dressed[key] = helped(job, recipe, space, peer in CHOOSES_LAYOUT)
        return Entrant(dressed[key], kept=True)

    ours = from_plain(Recipe, found[OURS].get("recipe", to_plain(FALLBACK)))
    theirs = {p: help_to(p, recipe) for p, recipe in chose.items()}
    sides = {CHOSEN: ({p: Entrant(ours, kept=False) for p in theirs}, dict(theirs))}
    if "recipe" in found[OURS]:
        sides[CHOSEN][0][ALIKE] = Entrant(ours, kept=False)
        sides[CHOSEN][1][ALIKE] = Entrant(in_plain_float32(ours), kept=False)
        knobs = {p: Entrant(with_knobs_of(ours, e.recipe), kept=False) for p, e in theirs.items()}
        sides[KNOBS] = (knobs, theirs)
    if "recipe" in found[OURS_AT_THE_BATCH]:
        fixed = from_plain(Recipe, found[OURS_AT_THE_BATCH]["recipe"])
        at = {p: help_to(p, at_batch(recipe, batch)) for p, recipe in chose.items()}
        sides[AT_BATCH] = ({p: Entrant(fixed, kept=False) for p in at}, at)
    return sides


def time_in_alternation(
    job: KeptJob, found: Found, sides: Mapping[str, Sides], rounds: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """By comparison: each peer's recipe, and autoprec's over it; all of them in one alternation.

    Most recipes stand in several comparisons, and equal ones run once.
    """
    entrants = {
        (comparison, side, peer): entrant
        for comparison, both in sides.items()
        for side, by_peer in zip(SIDES, both, strict=True)
        for peer, entrant in by_peer.items()
    }
    peaks = {name: peak_bytes(found, *name[1:]) for name in entrants}
    rates, out = rates_of(job, entrants, peaks, rounds)
    rows: dict[str, dict[str, dict[str, Any]]] = {comparison: {} for comparison in sides}
    for comparison, peer in dict.fromkeys((name[0], name[2]) for name in entrants):
        names = {side: (comparison, side, peer) for side in SIDES}
        row = {side: to_plain(entrants[name].recipe) for side, name in names.items()}
        failed = [f"{side} {out[name]}" for side, name in names.items() if name in out]
        if failed:
            row["failed"] = failed[-1]
        else:
            row["rates"] = {side: rates[name] for side, name in names.items()}
            row["ours_over"] = to_plain(paired_ratio(*row["rates"].values()))
        rows[comparison][peer] = row
    return rows


def peak_bytes(found: Found, side: str, peer: str) -> int:
    """What a search's process held at most, as a bound of what its choice will hold.

    Our side in a comparison may run at the peer's batch, so the larger of both is taken.
    """
    own = found[OURS].get("peak_memory_bytes", UNKNOWN_BYTES)
    theirs = found.get(peer, {}).get("peak_memory_bytes")
    if side == "ours":
        return max(own, theirs or 0)
    return theirs or (own if peer not in found else UNKNOWN_BYTES)


def describe(result: Mapping[str, Any]) -> str:
    """A search in a line."""
    recipe = result.get("recipe")
    choice = "nothing" if recipe is None else words(recipe)
    seconds = result.get("seconds")
    time_taken = "" if seconds is None else f" in {seconds:.0f} s"
    peak = result.get("peak_memory_bytes")
    memory = "" if peak is None else f", peak {peak / 2**30:.1f} GiB"
    return f"{choice}{time_taken}{memory} ({result['note']})"


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(p.stem for p in TASKS.glob("*.py") if not p.stem.startswith("keras"))
    parser.add_argument("--tasks", nargs="+", default=known, choices=known)
    parser.add_argument("--peers", nargs="+", default=list(RIVALS), choices=list(RIVALS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds anybody may search")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    from importlib.metadata import version

    packages = ("lightning", "accelerate", "pytorch-autotune")
    head = {**machine(), **{name: version(name) for name in packages}, "users_batch": USERS_BATCH}
    output = arguments.output or RESULTS / f"peers-{head['date']}-{head['family']}.jsonl"
    output.write_text("")
    results = []
    for task in arguments.tasks:
        print(task, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            result = compare(task, arguments.peers, arguments.rounds, arguments.limit, Path(folder))
        results.append(result)
        with output.open("a") as file:
            file.write(json.dumps({**head, **result}) + "\n")
        for comparison, rows in result["comparisons"].items():
            for peer, row in rows.items():
                said = row.get("failed") or ratio_text(row["ours_over"])
                print(f"  {comparison:8s} autoprec / {peer}: {said}", flush=True)
    for comparison, found in means(results).items():
        said = ", ".join(f"{peer} {times(value)}" for peer, value in found.items())
        print(f"{comparison}: geometric means of autoprec over {said}")


if __name__ == "__main__":
    main()
