"""Decides when the search stops.

It ends at the limit of trials, when its time is over, when every point that fits was measured, or
when no untried point is likely to be faster by more than one per cent, or by enough for the seconds
that its trial takes. What runs next to the fastest all the same, `acquisition` decides; which share
of the whole tuning's time limit is the search's, `tuning.time_limit`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.cost_model import Prediction


@dataclass(frozen=True)
class Limits:
    """What bounds the search: memory in bytes, trials, and when a gain is too small to look for.

    `optimism` is how many standard deviations above its prediction a point is hoped to be.
    `setup_seconds` is the cost of a trial in addition to its steps, which it times for
    `timed_seconds` and for at least `steps` steps with the warm-up. A trial must promise an
    expected gain of `gain_per_second` for every second that it takes, but for trials of up to
    `cheap_seconds` next to the fastest recipe: they are spent on what the model cannot know. A
    recipe whose step takes longer than `longest_step` seconds could not be proven in the time there
    is: its trial costs more than any gain. One that would not end in `seconds_left` is not begun.
    """

    memory_bytes: float | None = None
    trials: int | None = None
    gain: float = 0.01
    optimism: float = 1.3
    setup_seconds: float = 0.5
    timed_seconds: float = 0.5
    steps: int = 4
    gain_per_second: float = SPEED.gain_per_second
    cheap_seconds: float = 3.0
    longest_step: float = math.inf
    seconds_left: float = math.inf

    def with_setup(self, seconds: float | None) -> Limits:
        """Return these with the setup that trials were seen to take; None: as assumed.

        Which trials are cheap goes by their steps.
        """
        if seconds is None:
            return self
        cheap = self.cheap_seconds + seconds - self.setup_seconds
        return replace(self, setup_seconds=seconds, cheap_seconds=cheap)

    def trial_seconds(self, step_seconds: float) -> float:
        """Return what a trial costs whose steps take so long: its setup and its steps."""
        return math.inf if step_seconds > self.longest_step else self._seconds(step_seconds)

    def ends_in_time(self, step_seconds: float, compile_seconds: float = 0.0) -> bool:
        """Return whether a trial whose steps take so long would end in the seconds that are left.

        `compile_seconds` come on top where it compiles.
        """
        return self._seconds(step_seconds) + compile_seconds <= self.seconds_left

    def _seconds(self, step_seconds: float) -> float:
        return self.setup_seconds + max(self.timed_seconds, self.steps * step_seconds)


@dataclass(frozen=True)
class Stop:
    """No further point is worth its time, and why."""

    reason: str


ALL_MEASURED = Stop("every recipe that fits has been measured")
OUT_OF_TIME = Stop("no further trial would end within its share of the time limit")


def trial_limit_reached(trials: int, limits: Limits) -> Stop | None:
    """Return why to stop if as many trials have run as are allowed; else None."""
    if limits.trials is None or trials < limits.trials:
        return None
    return Stop(f"the limit of {limits.trials} trials is reached")


def time_limit_reached(
    seconds_left: float, time_limit: float, searched: float, search_limit: float | None
) -> Stop | None:
    """Return why to stop if a limit of time, in seconds, is reached; else None.

    `seconds_left` are those of the search's share of the tuning's `time_limit`. The search itself
    has taken `searched` of its `search_limit` (None: it has none).
    """
    if seconds_left <= 0:
        return Stop(f"its share of the time limit of {time_limit:g} s is used up")
    if search_limit is not None and searched >= search_limit:
        return Stop(f"the search's limit of {search_limit:g} s is reached")
    return None


def is_worth_a_trial(
    prediction: Prediction, cost_seconds: float, best_log_rate: float, limits: Limits
) -> bool:
    """Return whether a point is likely to be faster by more than `limits.gain`, for its seconds."""
    hoped = prediction.mean + limits.optimism * prediction.deviation
    gain = prediction.expected_gain(best_log_rate)
    return hoped > best_log_rate + limits.gain and gain > limits.gain_per_second * cost_seconds


def nothing_worth_a_trial(limits: Limits) -> Stop:
    """Return why to stop where `is_worth_a_trial` holds for no untried point."""
    return Stop(f"no untried recipe is likely to be more than {limits.gain:.0%} faster")
