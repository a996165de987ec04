"""Ratios, shares, rates and times in words: one number has the same digits in every report."""

from __future__ import annotations

import math


def times(ratio: float, digits: int = 2) -> str:
    """Show a measured ratio with `digits` decimals: "1.84x"; a small one as "0.042x"."""
    return f"{decimals(ratio, digits)}x"


def decimals(ratio: float, digits: int = 2) -> str:
    """Show a ratio without its "x"; below 0.1 with two significant digits."""
    return f"{ratio:.{digits}f}" if ratio >= 0.1 else f"{ratio:.2g}"


def about_times(ratio: float) -> str:
    """Show an estimate with two significant digits and without an exponent: "2.2x", "770x"."""
    return f"{plain_number(ratio, 2)}x"


def percent(share: float) -> str:
    """Show a share with two significant digits: 0.013 is "1.3 %", 1.07 is "107 %"."""
    if not math.isfinite(share):
        return "infinitely far"
    return f"{100 * share:.0f} %" if 0.995 <= share < 100.0 else f"{100 * share:.2g} %"


def plain_number(number: float, digits: int = 3) -> str:
    """Show a number with so many significant digits; a large one has no exponent: "154000"."""
    return f"{float(f'{number:.{digits}g}'):.15g}"


def rate_number(rate: float) -> str:
    """Show a throughput with three significant digits, without its unit: "1450", "9.88"."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def milliseconds(seconds: float) -> str:
    """Show the time of a step with two significant digits: "3.1 ms", "412 ms"."""
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.0995 else f"{1e3 * seconds:.2g} ms"
