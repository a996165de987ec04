"""What a tuning loses when other processes come and go while it measures.

    python -m benchmarks.search.regret [--tasks mlp lstm] [--seeds 3]

Each task is tuned on the idle machine, and once for each seed beside a process that keeps a core
busy for half a second to four seconds at a time, as long apart. Then what was chosen each time runs
in alternation on the idle machine. The regret is what a disturbed choice falls short of the
undisturbed one. The exit code is 1 where the lower end of that ratio is below 0.9 (`BOUND`), also
where the tuning called itself inconclusive: nothing was gained then, either.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.api import tune
from autoprec.core.codec import to_plain
from autoprec.core.profile import Profile
from autoprec.core.profile.claims import CHANGE_SHARE
from autoprec.core.speed.noise import paired_ratio
from autoprec.yaml_files import write_text
from benchmarks.checkout import RESULTS, TASKS
from benchmarks.interleaving import alternate
from benchmarks.provenance import machine
from benchmarks.search.grids import make_job
from benchmarks.search.oracle_rows import ratio_text

#: Keeps a core busy until it is killed or the seconds given are over.
SPIN = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    sum(range(10**6))
"""
SHORTEST, LONGEST = 0.5, 4.0

#: The least that a disturbed choice may run at, as a share of the undisturbed one: a profile that
#: falls short of its word by more fails `autoprec verify`, so a tuning may not lose more, either.
BOUND = 1 - CHANGE_SHARE


@contextlib.contextmanager
def neighbours(seed: int) -> Iterator[list[float]]:
    """Keep a core busy now and then; yields how many seconds it was each time."""
    draw, over, spent = random.Random(seed), threading.Event(), []

    def come_and_go() -> None:
        while not over.wait(draw.uniform(SHORTEST, LONGEST)):
            seconds = draw.uniform(SHORTEST, LONGEST)
            busy = subprocess.Popen([sys.executable, "-c", SPIN, str(LONGEST)])
            over.wait(seconds)
            busy.kill()
            busy.wait()
            spent.append(seconds)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        yield spent
    finally:
        over.set()
        thread.join()


def tuned(task: str, folder: Path, name: str) -> Profile:
    """A profile from a study of its own."""
    return tune(
        TASKS / f"{task}.py",
        device="cpu",
        output=folder / f"{name}.yaml",
        storage=str(folder / f"{name}.journal"),
    )


def compare(task: str, seeds: int, rounds: int) -> list[dict[str, Any]]:
    """The undisturbed tuning of a task, the disturbed ones, and all that they chose measured."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        idle = tuned(task, folder, "idle")
        disturbed, spent = [], []
        for seed in range(seeds):
            with neighbours(seed) as seconds:
                disturbed.append(tuned(task, folder, str(seed)))
            spent.append(sum(seconds))
        job, _ = make_job(TASKS / f"{task}.py", folder, wide=True)
        found = [idle, *disturbed]
        peaks = {p.recipe.key(): p.evidence.chosen.peak_memory_bytes for p in found}
        rates = alternate(job, [p.recipe for p in found], peaks, rounds)
    own = rates[idle.recipe.key()]
    return [
        {
            "task": task,
            "seed": seed,
            "idle": to_plain(idle.recipe),
            "disturbed": to_plain(profile.recipe),
            "busy_seconds": round(seconds, 1),
            "tuning_seconds": profile.evidence.tuning_seconds,
            "inconclusive": profile.evidence.inconclusive,
            "disturbed_over_idle": to_plain(paired_ratio(rates[profile.recipe.key()], own)),
        }
        for seed, profile, seconds in zip(range(seeds), disturbed, spent, strict=True)
    ]


def in_words(row: Mapping[str, Any]) -> str:
    """A tuning's regret, with its interval."""
    ratio = ratio_text(row["disturbed_over_idle"], 3)
    return f"{row['task']} seed {row['seed']}: {ratio} of the undisturbed choice"


def below_bound(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Those that may fall short by more than the bound, in words."""
    return [in_words(row) for row in rows if row["disturbed_over_idle"]["low"] < BOUND]


def main(words: Sequence[str] | None = None) -> int:
    """Run, print, store, and fail where a disturbed choice falls short by more than the bound."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"The exit code is 1 where a disturbed choice runs below {BOUND:.1f} of the "
        "undisturbed one, by the lower end of the interval.",
    )
    known = sorted(path.stem for path in TASKS.glob("*.py"))
    parser.add_argument("--tasks", nargs="+", default=["mlp", "lstm"], choices=known)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    head = machine()
    output = arguments.output or RESULTS / f"regret-{head['date']}-{head['family']}.json"
    rows: list[dict[str, Any]] = []
    for task in arguments.tasks:
        for row in compare(task, arguments.seeds, arguments.rounds):
            rows.append(row)
            busy = f"{row['busy_seconds']:.0f} of {row['tuning_seconds']:.0f} s"
            print(f"{in_words(row)}; busy for {busy}", flush=True)
        write_text(output, json.dumps({**head, "rows": rows}, indent=1) + "\n")
    for line in below_bound(rows):
        print(f"below {BOUND:.1f}: {line}")
    return 1 if below_bound(rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
