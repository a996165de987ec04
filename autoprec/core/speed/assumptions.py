"""What is assumed of noise and taken for worth its time wherever speed is measured or compared.

All in one place, each with where it comes from: they depend on each other, and a second that one
stage spends for less than another would is a second too many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """The constants of the comparison of recipes. Deviations are of logarithms of rates."""

    # What a second is worth ----------------------------------------------------------------------

    gain_per_second: float = 5e-4
    """The gain in log throughput for which a second of tuning is spent: it pays off in 2,000 s of
    training. A trial of the search, a round of a comparison and the processes that either starts
    have this price."""

    worker_seconds: float = 2.0
    """What a new worker takes until its first session can be opened, and what it imports then: 0.9
    and 1 s for PyTorch on a Zen 5 (Keras 2.3 s, on GPUs 7 to 9 s)."""

    compile_seconds: float = 40.0
    """What compiling a recipe is taken to need, until one has run compiled: torch.compile took 1 to
    35 s for 14 recipes on a Xeon with AMX (benchmarks/results/compiled-2026-11-21.json), 55 s for
    a GPT on a GPU, XLA 1 to 8 s."""

    min_gain: float = 0.02
    """A recipe that gains less than this share over the baseline is not worth recommending."""

    same_speed_share: float = 0.01
    """Recipes of one batch whose rates differ by less than this share are equally fast."""

    knee_share: float = 0.02
    """The knee is the smallest batch within this share of the most samples a second. A larger batch
    needs another learning rate, and more samples for the same loss: not worth two per cent."""

    most_share: float = 0.0025
    """Where the most samples a second are wanted, a smaller batch within this share is as good. The
    ratio of two batches is known to a per cent or two, and what is given up here comes on top: of
    races resampled from recorded rounds, 4.7 % ended more than 3 % slower with a share of 1 %, and
    0.2 % with none."""

    loader_share: float = 0.05
    """What a loader feeds is known no better than this, for it is timed over few batches."""

    may_be_fastest_share: float = 0.95
    """A recipe at this share of the fastest one's rate may be the fastest: machines drift."""

    # Turns and rounds ----------------------------------------------------------------------------

    turn_seconds: float = 0.15
    """The duration of a recipe's turn in a round, unless a single step takes longer."""

    most_turns: int = 10
    """The most turns that a recipe has in a round of new processes."""

    min_rounds: int = 3
    """Rounds before any recipe is eliminated: among fewer, a disturbed one may decide."""

    most_rounds: int = 20
    """The most rounds of a race."""

    most_contenders: int = 5
    """At most this many recipes of the search race."""

    look_ahead_rounds: tuple[int, ...] = (1, 2, 4, 8, 16)
    """How many rounds ahead a gain may lie."""

    comparison_seconds: float = 5.0
    """Recipes that are timed only for comparison may take this many seconds in all."""

    # Noise ---------------------------------------------------------------------------------------

    search_ratio_error: float = 0.1
    """How far the ratio of two recipes in the search may be off: each was timed once, for half a
    second, and the fastest of many is often only the luckiest."""

    round_deviation: float = 0.05
    """How far a round's ratio of two recipes is off where no rounds tell better. Between the
    processes of recorded runs in fresh processes on CPUs, ratios differed by 3 to 8 %."""

    assumed_rounds: int = 2
    """As many rounds as `round_deviation` counts for in an interval: few, since machines differ.
    With them 93 % of the intervals over three rounds hold where rounds differ by 8 %, 98 % where
    they differ by 5 %."""

    race_assumed_rounds: float = 1.0
    """As many rounds as it counts for in a race, where all recipes' rounds are pooled."""

    ranked_rounds: int = 6
    """With fewer rounds no signed ranks give 95 %."""

    turns_over_processes: float = 2.0
    """Turns of a pair of sessions differ by 3 to 13 %, and pairs beyond that by 0.3 to 4 %, as
    measured on three recipes on a Xeon with AMX (benchmarks/search/session_pairs.py). So much more
    turns differ at least."""

    sharp_width: float = 0.04
    """An interval that is no wider needs no further round."""

    enough_width: float = 0.14
    """Nor does one of half the gain that is no wider than this, 7 % to either side: a claim is
    broken where it is a tenth short (`core.profile.claims`). With 0.21, which is that tenth, fewer
    intervals hold where rounds differ by 10 %, 92.7 instead of 94.3 % for a gain of 1.6x; with 0.14
    as many as with a quarter of the gain (benchmarks/search/rounds.py)."""

    # Disturbances --------------------------------------------------------------------------------

    disturbed_ratio_range: tuple[float, float] = (1.2, 1.65)
    """How much longer than expected a disturbed step takes. Other processes on a shared machine
    take a fifth or more; beyond the upper bound it is the recipe that is slow."""

    out_of_line_factor: float = 1.65
    """A turn further than this from the recipe's median turn is timed again, whether it was faster
    or slower, and the second timing counts. It is four deviations of sessions that differ by an
    eighth; single turns were off by factors of 6 to 30."""

    wide_interval_factor: float = 1.5
    """An interval whose ends are this many times apart is too wide if it is also wider than the
    gain itself: "1.48x (1.10-2.18)". No recorded tuning has such an interval."""

    contradiction_factor: float = 2.0
    """Two intervals of one ratio, from the search and from the rounds, contradict each other if
    they lie this many times apart: a disturbed step in either explains 1.65."""

    overstated_log_ratio: float = 0.2
    """An interval this far below that of the race means that either was misled: twice what the
    search's ratios are off by."""

    rate_change_factor: float = math.sqrt(10)
    """A recipe whose rate changes by this factor is closer to an order of magnitude than to its
    former rate. Another busy process takes half of a machine."""

    surely_slower_share: float = 0.5
    """A recipe that must be taken and ran below this share of the baseline's speed in the search is
    slower, whatever disturbed either: measuring by how much is worth no further round."""


SPEED = Assumptions()
"""The assumptions that hold."""
