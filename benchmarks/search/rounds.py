"""What the final rounds of a tuning take, and how often their intervals hold, on drawn noise.

A round's processes differ by one deviation, its turns by another, and one in twenty is four times
as far off. Rounds and turns end as they do in a tuning; a process and a pass over all recipes take
what they do in `make demo` on two cores. Nothing is run, so that it takes seconds.

    python -m benchmarks.search.rounds
    python -m benchmarks.search.rounds --all-turns     # rounds have all the turns they may have

Of each row: the mean rounds and seconds, how many intervals hold the true ratio, how many tunings
claim a speed-up, and how many claims are a tenth too high.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass

from autoprec.core.ratio import Ratio
from autoprec.core.speed.noise import is_faster, paired_ratio
from autoprec.core.speed.rounds import level_turns, rounds_are_enough, turns_are_enough, turns_worth
from autoprec.tuning.options import Options

#: Deviations of the ratio of two recipes: between processes, and between the turns of a process.
NOISES = ((0.01, 0.03), (0.025, 0.05), (0.04, 0.10), (0.08, 0.13))
GAINS = (1.0, 1.15, 1.3, 1.6, 2.0, 2.9)
RECIPES, PROCESS_SECONDS, PASS_SECONDS = 4, 6.0, 0.75


@dataclass(frozen=True)
class Confirmed:
    """What final rounds told, and the seconds that they took."""

    ratio: Ratio
    seconds: float


def confirm(gain: float, noise: tuple[float, float], seed: int, *, all_turns: bool) -> Confirmed:
    """Draw rounds of a recipe that is so much faster than the first, until they are enough."""
    draw, seconds, asked = random.Random(seed), 0.0, Options().rounds
    most = turns_worth(PROCESS_SECONDS, PASS_SECONDS)

    def error(deviation: float) -> float:
        far = 4.0 if draw.random() < 0.05 else 1.0
        return far * draw.gauss(0.0, deviation) / math.sqrt(2)

    own: list[float] = []
    base: list[float] = []
    while True:
        speeds = [(math.log(gain) if n == 1 else 0.0) + error(noise[0]) for n in range(RECIPES)]
        turns: list[list[float]] = [[] for _ in speeds]
        while len(turns[0]) < most and (all_turns or not turns_are_enough(turns)):
            for each, speed in zip(turns, speeds, strict=True):
                each.append(-speed + error(noise[1]))
        levels, _ = level_turns(turns)
        seconds += PROCESS_SECONDS + PASS_SECONDS * len(turns[0])
        base.append(math.exp(-levels[0]))
        own.append(math.exp(-levels[1]))
        ratio = paired_ratio(own, base)
        if len(own) == 2 * asked or rounds_are_enough(ratio, asked, early=True):
            return Confirmed(ratio, seconds)


def row(gain: float, noise: tuple[float, float], count: int, *, all_turns: bool) -> str:
    """The line of a gain and a noise."""
    found = [confirm(gain, noise, seed, all_turns=all_turns) for seed in range(count)]
    ratios = [each.ratio for each in found]

    def share(those: list[bool]) -> str:
        return f"{sum(those) / count:6.1%}"

    return (
        f"{gain:4.2f}x {noise[0]:5.1%} {noise[1]:5.1%} "
        f"{sum(each.rounds for each in ratios) / count:6.1f} "
        f"{sum(each.seconds for each in found) / count:7.1f} "
        f"{share([each.low <= gain <= each.high for each in ratios])} "
        f"{share([is_faster(each) for each in ratios])} "
        f"{share([each.ratio > 1.1 * gain for each in ratios])}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="tunings of each row")
    parser.add_argument("--all-turns", action="store_true")
    arguments = parser.parse_args()
    print(" gain  between noise rounds seconds  holds claims  tenth")
    for gain in GAINS:
        for noise in NOISES:
            print(row(gain, noise, arguments.count, all_turns=arguments.all_turns), flush=True)


if __name__ == "__main__":
    main()
