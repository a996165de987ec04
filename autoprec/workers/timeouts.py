"""Decides how long a worker may go on without progress before it is taken for hung."""

from __future__ import annotations

import os
from collections.abc import Mapping

from autoprec.errors import UsageError

#: Seconds a phase may take without progress. Compilation and first steps are slow and silent.
PHASE_TIMEOUT_SECONDS: Mapping[str, float] = {
    "start": 120.0,
    "load": 300.0,
    "script": 600.0,
    "build": 600.0,
    "data": 600.0,
    "compile": 1200.0,
    "warmup": 900.0,
    "describe": 600.0,
}


FIRST_STEP_TIMEOUT_SECONDS = 300.0


#: A step may take this many times the slowest step so far, and the minimum in any case.
STEP_TIMEOUT_FACTOR = 30.0


MIN_STEP_TIMEOUT_SECONDS = 60.0


#: The environment variable whose number multiplies every timeout, for very slow machines.
PATIENCE_VARIABLE = "AUTOPREC_PATIENCE"


def patience_factor() -> float:
    """Read the factor on every timeout from the environment; `UsageError` if it is no number."""
    text = os.environ.get(PATIENCE_VARIABLE, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise UsageError(
            f"{PATIENCE_VARIABLE}={text!r} given, expected a number above 0 such as 10"
        )
    return factor


def allowed_seconds(
    phase: str, *, first_step_seconds: float, slowest_step_seconds: float, patience: float = 1.0
) -> float:
    """Return the seconds that a phase may go on without progress.

    `slowest_step_seconds` is the slowest timed step so far, 0 before the first.
    """
    seconds = PHASE_TIMEOUT_SECONDS.get(phase)
    if seconds is None:
        seconds = first_step_seconds
        if phase == "steps" and slowest_step_seconds > 0:
            seconds = max(MIN_STEP_TIMEOUT_SECONDS, STEP_TIMEOUT_FACTOR * slowest_step_seconds)
    return seconds * patience


def explain_timeout(phase: str, seconds: float) -> str:
    """Say which phase made no progress, and how to wait for longer."""
    said = f"no progress for {seconds:.0f} s in the phase {phase!r}"
    if phase == "script":
        said = (
            f"the script ran for {seconds:.0f} s without a call of fit or train; a function that "
            "returns what it trains needs no such call: `autoprec tune train.py:build`"
        )
    return f"{said} ({PATIENCE_VARIABLE}=10 in the environment waits ten times as long)"
