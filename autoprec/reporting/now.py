"""What a tuning is doing at this moment, in one line, and about how long it will go on.

How long is a guess from recorded tunings (docs/results.md): a search ends after a dozen trials, the
comparison and the confirmation take half as long as it each, and a proof 200 steps or a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from autoprec.reporting.text import phase_text, recipe_text, stage_text
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

_TRIALS = 12
_PROOF_STEPS, _PROOF_SECONDS = 200, 60.0
_ORDER = ("search", "heats", "proof", "finish")


class Now:
    """Follows a tuning's events; `text` is the line. `limit` is its time limit, in seconds."""

    def __init__(
        self, limit: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit, self._clock = limit, clock
        self._began = self._stage_began = clock()
        self._trial_began = self._searched = 0.0
        self._stage, self._doing, self._where = "", "starting", ""
        self._points, self._trials = 0, 0
        self._best, self._proof = 0.0, 0.0
        self._speeds = True

    def __call__(self, event: Event) -> None:
        """Take one event in."""
        self._where = ""
        match event:
            case Started():
                self._speeds = not event.facts.observation.rehearsal
            case Described():
                self._points = event.points
            case Stage():
                self._stage, self._stage_began = event.name, self._clock()
                self._doing = stage_text(event.name, event.detail)
            case TrialStarted():
                self._trial_began = self._clock()
                best = f"; best so far {self._best:.2f}x" if self._best and self._speeds else ""
                of = f" of at most {self._points}" if self._points else ""
                self._doing = f"trial {event.number + 1}{of}: {recipe_text(event.recipe)}{best}"
            case TrialFinished():
                self._trial_finished(event)
            case Progress():
                self._where = phase_text(event.phase, event.step)
            case Round():
                first, *others = (rate for rate in event.rates if rate)
                shown = ", ".join(f"{rate / first:.2f}x" for rate in others)
                so_far = f": {shown}" if self._speeds and shown else ""
                round_text = f"round {event.number} of at most {event.of}{so_far}"
                self._doing = stage_text(self._stage, round_text)
            case Finished():
                self._stage, self._doing = "", "done"
            case _:
                return

    def _trial_finished(self, event: TrialFinished) -> None:
        self._best = event.best / event.baseline if event.baseline else 0.0
        self._trials += 1
        self._searched += self._clock() - self._trial_began
        measured = event.outcome.measurement
        if measured is not None and event.outcome.rate >= event.best:
            self._proof = min(_PROOF_SECONDS, _PROOF_STEPS * measured.step_seconds)

    @property
    def text(self) -> str:
        """What is going on, where in it, and about how long it takes yet."""
        where = f"  [{self._where}]" if self._where else ""
        left = self.seconds_left()
        return f"{self._doing}{where}" + ("" if left is None else f"  {left_text(left)}")

    def seconds_left(self) -> float | None:
        """About how many seconds are left; None where nothing is known to guess from."""
        now = self._clock()
        limited = None if self._limit is None else self._limit - (now - self._began)
        if not self._trials or self._stage not in _ORDER:
            return limited
        expected = max(self._trials + 1, min(self._points or _TRIALS, _TRIALS))
        search = self._searched * expected / self._trials
        takes = {"search": search, "heats": search / 2, "proof": self._proof, "finish": search / 2}
        here = _ORDER.index(self._stage)
        left = max(0.0, takes[self._stage] - (now - self._stage_began))
        left += sum(takes[name] for name in _ORDER[here + 1 :])
        return left if limited is None else min(left, limited)


def left_text(seconds: float) -> str:
    """A guess in words, no sharper than it is: "about 40 s left"."""
    if seconds < 5:
        return "almost done"
    if seconds < 90:
        return f"about {5 * round(seconds / 5)} s left"
    return f"about {round(seconds / 60)} min left"
