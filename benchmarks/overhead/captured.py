"""What a step costs that was captured of a script, against the same training's task file.

    python -m benchmarks.overhead.captured [--processes 9] [--seconds 0.5] [--trainers lightning]

The projects are those of examples/trainers (`captured_projects`), at their own batch in float32. A
worker of each form opens a session, and both take turns; each such pair of workers gives one pair
of medians. Printed is the ratio of step times, captured over written, over the pairs of workers
with its 95 % interval. A captured step may take 5 % longer, or 50 us where it takes less than 1 ms;
the exit code is 1 where the whole interval is above that.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from operator import truediv
from pathlib import Path
from statistics import median

from autoprec.core.recipe import Recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.workers.client import WorkerSettings
from autoprec.workers.runner import Runner
from benchmarks.overhead.captured_projects import WRITTEN, sources_of

ALLOWED_SHARE, ALLOWED_SECONDS, SHORT_SECONDS = 0.05, 50e-6, 1e-3
_TURNS = 10
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def pair_of(trainer: str, seconds: float) -> tuple[float, float]:
    """Time one worker of each form in turns; return the steps of both: captured, written."""
    budget = TimingBudget(seconds=seconds, precision=0.0, max_steps=10_000)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        runners = [
            closing.enter_context(Runner(WorkerSettings(source, environment=_ONE_THREAD), None))
            for source in sources_of(trainer, Path(folder))
        ]
        for runner in runners:
            batch = runner.load().batch_size or 32
            runner.call("open", name="turns", recipe=Recipe(batch_size=batch), seed=0)
        times: list[list[float]] = [[], []]
        for turn in range(_TURNS):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                timed = runners[which].call("time", name="turns", budget=budget)
                times[which].append(timed.step_seconds)
    written = median(times[1])
    return written * median(map(truediv, *times)), written


def allowed(step: float) -> float:
    """Return the ratio that is allowed at a written step of so many seconds."""
    if step < SHORT_SECONDS:
        return 1.0 + max(ALLOWED_SHARE, ALLOWED_SECONDS / step)
    return 1.0 + ALLOWED_SHARE


def main() -> int:
    """Time and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one turn")
    parser.add_argument("--trainers", nargs="+", choices=list(WRITTEN), default=list(WRITTEN))
    arguments = parser.parse_args()
    above = False
    for trainer in arguments.trainers:
        pairs = [pair_of(trainer, arguments.seconds) for _ in range(arguments.processes)]
        ratio = paired_ratio([one for one, _ in pairs], [other for _, other in pairs])
        step = median(other for _, other in pairs)
        limit = allowed(step)
        above |= ratio.low > limit
        print(
            f"{trainer}: captured over written {ratio.ratio:.3f} ({ratio.low:.3f}-"
            f"{ratio.high:.3f}, {ratio.rounds} pairs of workers), step {1e3 * step:.2f} ms, "
            f"allowed {limit:.3f}",
            flush=True,
        )
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
