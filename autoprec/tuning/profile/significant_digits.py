"""Rounds measured numbers for the profile to what they can tell."""

from __future__ import annotations

from dataclasses import replace

from autoprec.core.speed.noise import Ratio


def significant(value: float) -> float:
    """Return a number to six significant digits."""
    return float(f"{value:.6g}")


def rounded(ratio: Ratio) -> Ratio:
    """Return a ratio and its interval to four decimal places."""
    return replace(
        ratio, ratio=round(ratio.ratio, 4), low=round(ratio.low, 4), high=round(ratio.high, 4)
    )
