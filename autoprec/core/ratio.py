"""A ratio that was measured, with the interval that it lies in."""

from collections.abc import Callable
from dataclasses import dataclass

from autoprec.core.codec import bounded
from autoprec.core.number_words import decimals, times

#: Makes of a number and its text what a report shows of it.
Show = Callable[[float, str], str]


@dataclass(frozen=True)
class Ratio:
    """A ratio measured in alternating rounds: its pseudomedian over them and the 95 % interval."""

    ratio: float = bounded(low=0.0, high=1e9)
    low: float = bounded(low=0.0, high=1e9)
    high: float = bounded(low=0.0, high=1e9)
    rounds: int = bounded(low=0, high=10**6)

    def in_words(self, digits: int = 2, show: Show = lambda value, text: text) -> str:
        """Show it with its interval, where it has one: "1.84x (1.79-1.88, 7 rounds)".

        `digits` are the decimals. `show` is given each number and its text, and may mark that up.
        """
        low, high = (show(each, decimals(each, digits)) for each in (self.low, self.high))
        known = [f"{low}-{high}"] if self.low < self.high else []
        if self.rounds:
            plural = "" if self.rounds == 1 else "s"
            known.append(f"{show(self.rounds, str(self.rounds))} round{plural}")
        ratio = show(self.ratio, times(self.ratio, digits))
        return f"{ratio} ({', '.join(known)})" if known else ratio

    def as_share(self, show: Show = lambda value, text: text) -> str:
        """Show a share with its interval, in per cent: "12% (10-14)"."""
        low, high = (show(each, f"{100 * each:.0f}") for each in (self.low, self.high))
        return f"{show(self.ratio, f'{self.ratio:.0%}')} ({low}-{high})"
