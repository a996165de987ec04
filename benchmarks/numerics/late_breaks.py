"""Prints whether checks during training catch what breaks late, and what they rescue.

    python -m benchmarks.numerics.late_breaks [--framework torch keras] [--only NAME ...]
                                              [--jobs N] [--output FILE]

Each break trains for a thousand updates: in float32, in float32 with noise of bfloat16's size on
its first weights, in 16 bits, and in 16 bits with `watch="float32"`, checked as often as trainings
are that say nothing else. None is broken in its first steps, which is all that the check before
training sees. Rescued is what ends no further above float32 than `NOISE_FACTOR` times as far as
noise ends from it, or than `LEAST` of it. What was lost before the alarm no mend brings back: it
shows in where plain float32 ends from the weights at the alarm, and what is not rescued, but ends
as near to that, is mended as well as can be. What is healthy for as long is a matter of `watched`.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from autoprec.core.dtypes import Policy
from autoprec.core.number_words import percent
from autoprec.core.numerics.tolerance import finite_or_none
from autoprec.core.numerics.watching import FIRST_DOUBLED, WatchedStep
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.watch_settings import EVERY
from benchmarks.numerics.zoo_tables import share
from benchmarks.provenance import machine

BATCH = INPUTS = 8
UPDATES, LAST = 1000, 100
NOISE, NOISE_DRAWS = 2.0**-9, 8
NOISE_FACTOR, LEAST = 3.0, 0.02

FLOAT32 = Recipe(batch_size=BATCH)
BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=BATCH)
FLOAT16 = Recipe(
    policy=Policy.MIXED_FLOAT16,
    batch_size=BATCH,
    loss_scale=LossScale(mode="dynamic", initial=2.0**12),
)
FIXED = replace(FLOAT16, loss_scale=LossScale(mode="fixed", initial=1.0, floor=1.0))

RECIPES: Mapping[str, Recipe] = {
    "logit scale": FLOAT16,
    "norm input": FLOAT16,
    "frequency": BFLOAT16,
    "residual": BFLOAT16,
    "variance": BFLOAT16,
    "running sum": BFLOAT16,
    "late row": FLOAT16,
    "threshold": BFLOAT16,
    "gradients decay": FIXED,
    "ratio": BFLOAT16,
    "loss near zero": BFLOAT16,
    "batch norm overflow": FLOAT16,
    "long batch": FLOAT16,
}
"""By the name of a break, the recipe that it breaks under. Both frameworks have all of them."""


@dataclass(frozen=True)
class Pace:
    """How soon a training breaks.

    What grows does so by a factor `growth` an update, `late` is the number of updates before what
    comes late, of which one in `rare` has what comes now and then.
    """

    growth: float
    late: int
    rare: int

    def is_long(self, index: int) -> bool:
        """Say whether a batch is one of the long ones, counted from 0."""
        return index > self.late and index % self.rare == 0


QUICK, SLOW = Pace(1.6, 8, 7), Pace(1.03, 200, 50)


@dataclass(frozen=True)
class Ended:
    """How a training ended: the mean of its last losses, and the checks that were made in it."""

    loss: float
    watched: tuple[WatchedStep, ...] = ()
    kept: tuple[str, ...] = ()


def trained(framework: str, name: str, recipe: Recipe, **how: Any) -> Ended:
    """Train a break of a framework's.

    `how` is its `watch`, its draw of `noise`, or `float32_from`: the update with whose check it
    becomes plain float32.
    """
    if framework == "torch":
        from benchmarks.numerics import late_breaks_torch

        return late_breaks_torch.ended(name, recipe, **how)
    from benchmarks.numerics import late_breaks_keras

    return late_breaks_keras.ended(name, recipe, **how)


def row(framework: str, name: str) -> dict[str, Any]:
    """Train one break in all ways; return what came of it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    train, recipe = partial(trained, framework, name), RECIPES[name]
    exact = train(FLOAT32).loss
    noise = max(abs(train(FLOAT32, noise=draw).loss - exact) for draw in range(NOISE_DRAWS))
    unwatched, watched = train(recipe), train(recipe, watch="float32")
    alarm = next((each for each in watched.watched if each.action), None)
    near = max(NOISE_FACTOR * noise, LEAST * abs(exact))
    rescued, there = watched.loss - exact <= near, exact
    if alarm and not rescued:
        there = train(recipe, float32_from=alarm.updates).loss
    return {
        "framework": framework,
        "break": name,
        "policy": recipe.policy.value,
        "float32": exact,
        "noise": noise,
        "unwatched": finite_or_none(unwatched.loss),
        "watched": finite_or_none(watched.loss),
        "healthy_at_first": not watched.watched[0].problem,
        "alarm": alarm and alarm.updates,
        "said": alarm.problem if alarm else "",
        "kept": list(watched.kept),
        "from_alarm": None if rescued else finite_or_none(there),
        "rescued": rescued,
        "mended": watched.loss - max(exact, there) <= near,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each break, then how many were caught and rescued."""
    heads = ("framework", "break", "policy", "caught at", "float32 ends at", "16 bits", "watched")
    heads = (*heads, "float32 from the alarm on")
    yield f"| {' | '.join(heads)} | rescued |"
    yield "|---" * (len(heads) + 1) + "|"
    for each in rows:
        float32 = f"{each['float32']:.4g} (noise: {percent(each['noise'] / abs(each['float32']))})"
        cells = [each["framework"], each["break"], each["policy"], each["alarm"] or "not caught"]
        ends = (each["unwatched"], each["watched"])
        cells += [float32, *("not finite" if end is None else f"{end:.4g}" for end in ends)]
        cells.append("-" if each["from_alarm"] is None else f"{each['from_alarm']:.4g}")
        yield f"| {' | '.join(map(str, cells))} | {'yes' if each['rescued'] else 'no'} |"
    for framework in dict.fromkeys(each["framework"] for each in rows):
        own = [each for each in rows if each["framework"] == framework]
        caught = share([sum(each["alarm"] is not None for each in own), len(own)])
        rescued = share([sum(each["rescued"] for each in own), len(own)])
        mended = share([sum(each["mended"] for each in own), len(own)])
        yield (
            f"{framework}: caught {caught}, rescued {rescued}; ends as float32 does from the alarm "
            f"on: {mended}"
        )


def last_losses(losses: Sequence[float]) -> float:
    """The mean of the last losses of a training."""
    return statistics.fmean(losses[-LAST:])


def _row_on_one_thread(framework: str, name: str) -> dict[str, Any]:
    from benchmarks.numerics.zoo import on_one_thread

    on_one_thread(framework)
    return row(framework, name)


def main() -> int:
    """Read the arguments; train; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    frameworks = ("torch", "keras")
    parser.add_argument("--framework", nargs="+", choices=frameworks, default=frameworks)
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--jobs", type=int, default=1, help="breaks at once")
    parser.add_argument("--output", type=Path, help="write the numbers here, as JSON")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for framework in arguments.framework:
        with get_context("spawn").Pool(arguments.jobs) as pool:
            for each in pool.imap(partial(_row_on_one_thread, framework), arguments.only):
                rows.append(each)
                print(json.dumps(each), file=sys.stderr, flush=True)
    print("\n".join(table(rows)))
    if arguments.output:
        head = {**machine("cpu"), "updates": UPDATES, "every": EVERY, "doubled": FIRST_DOUBLED}
        arguments.output.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
