"""What a tuning is doing now, in one line, and about how long it will take.

The time left is an estimate from the trials so far: a search ends after about sixteen, a check
takes 200 steps or a minute. Comparison and confirmation open a session for a few recipes, which
take turns; on a CPU each round of the confirmation does so in new processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from autoprec.core.device.observation import DeviceKind
from autoprec.core.number_words import times
from autoprec.core.recipe_words import describe_recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.reporting.text import phase_text, stage_text
from autoprec.tuning.events import (
    Described,
    Event,
    Finished,
    Progress,
    Round,
    Stage,
    Started,
    TrialFinished,
    TrialStarted,
)

_EXPECTED_TRIALS = 16
_EXPECTED_PROOF_STEPS, _MIN_PROOF_SECONDS, _MAX_PROOF_SECONDS = 200, 8.0, 60.0
_RACING, _RACE_ROUNDS = 6, 8
_CONFIRMED, _CONFIRMATION_TURNS = 3, 5
#: A session's opening beside its warm-up; a turn has a step that is not counted.
_OPENING_SECONDS, _TURN_OVERHEAD = 1.0, 1.5
_STAGE_ORDER = ("search", "reranking", "proof", "confirmation")


class StatusLine:
    """Follows a tuning's events; `text` is the line. `limit` is the time limit in seconds."""

    def __init__(
        self, limit: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit, self._clock = limit, clock
        self._began = self._stage_began = clock()
        self._trial_began = self._search_seconds = 0.0
        self._stage, self._activity, self._phase = "", "starting", ""
        self._recipes, self._trials = 0, 0
        self._best_ratio, self._proof_seconds = 0.0, 0.0
        self._turn_seconds, self._ready_seconds, self._worker_seconds = 0.0, 0.0, 0.0
        self._show_speeds = True
        self._weights_in = ""

    def __call__(self, event: Event) -> None:
        """Update the line for one event."""
        self._phase = ""
        match event:
            case Started():
                self._show_speeds = not event.facts.observation.rehearsal
                on_cpu = event.facts.kind is DeviceKind.CPU
                self._worker_seconds = SPEED.worker_seconds if on_cpu else 0.0
            case Described():
                self._recipes = event.points
                self._weights_in = event.facts.weights_in
            case Stage():
                self._stage, self._stage_began = event.name, self._clock()
                self._activity = stage_text(event.name, event.detail)
            case TrialStarted():
                self._trial_began = self._clock()
                best = (
                    f"; best so far {times(self._best_ratio)}"
                    if self._best_ratio and self._show_speeds
                    else ""
                )
                of = f" of at most {self._recipes}" if self._recipes else ""
                recipe = describe_recipe(event.recipe, self._weights_in)
                self._activity = f"trial {event.number + 1}{of}: {recipe}{best}"
            case TrialFinished():
                self._trial_finished(event)
            case Progress():
                self._phase = phase_text(event.phase, event.step)
            case Round():
                first, *others = (rate for rate in event.rates if rate)
                shown = ", ".join(times(rate / first) for rate in others)
                so_far = f": {shown}" if self._show_speeds and shown else ""
                round_text = f"round {event.number} of at most {event.of}{so_far}"
                self._activity = stage_text(self._stage, round_text)
            case Finished():
                self._stage, self._activity = "", "done"
            case _:
                return

    def _trial_finished(self, event: TrialFinished) -> None:
        self._best_ratio = event.best / event.baseline if event.baseline else 0.0
        self._trials += 1
        self._search_seconds += self._clock() - self._trial_began
        measured = event.outcome.measurement
        if measured is not None and event.outcome.rate >= event.best:
            proof = _EXPECTED_PROOF_STEPS * measured.step_seconds
            self._proof_seconds = max(_MIN_PROOF_SECONDS, min(_MAX_PROOF_SECONDS, proof))
            self._turn_seconds = _TURN_OVERHEAD * max(SPEED.turn_seconds, measured.step_seconds)
            self._ready_seconds = _OPENING_SECONDS + measured.warmup_seconds

    @property
    def text(self) -> str:
        """Return the activity, its phase, and about how much time is left."""
        where = f"  [{self._phase}]" if self._phase else ""
        left = self.seconds_left()
        return f"{self._activity}{where}" + ("" if left is None else f"  {time_left_text(left)}")

    def seconds_left(self) -> float | None:
        """Estimate the seconds left; None if there is nothing to estimate from."""
        now = self._clock()
        limited = None if self._limit is None else self._limit - (now - self._began)
        if not self._trials or self._stage not in _STAGE_ORDER:
            return limited
        expected = max(self._trials + 1, min(self._recipes or _EXPECTED_TRIALS, _EXPECTED_TRIALS))
        search = self._search_seconds * expected / self._trials
        turn, ready, new = self._turn_seconds, self._ready_seconds, self._worker_seconds
        takes = {
            "search": search,
            "reranking": new + _RACING * (ready + _RACE_ROUNDS * turn),
            "proof": self._proof_seconds,
            "confirmation": SPEED.min_rounds
            * (new + _CONFIRMED * (ready + _CONFIRMATION_TURNS * turn)),
        }
        here = _STAGE_ORDER.index(self._stage)
        left = max(0.0, takes[self._stage] - (now - self._stage_began))
        left += sum(takes[name] for name in _STAGE_ORDER[here + 1 :])
        return left if limited is None else min(left, limited)


def time_left_text(seconds: float) -> str:
    """Show an estimate with no more precision than it has: "about 40 s left"."""
    if seconds < 5:
        return "almost done"
    if seconds < 90:
        return f"about {5 * round(seconds / 5)} s left"
    return f"about {round(seconds / 60)} min left"
