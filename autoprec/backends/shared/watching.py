"""What is said of a fault that checks during training found, in all frameworks alike."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from autoprec.core.dtypes import Policy
from autoprec.core.numerics.watching import WatchedStep, named
from autoprec.errors import AutoprecError, AutoprecWarning


def fault(step: WatchedStep, policy: Policy) -> str:
    """Say when a check failed, and what it found."""
    said = step.problem or "another rank's part of the batch is not what float32 computes"
    return f"after {step.updates - 1} updates in {policy} {said}"


def told_what_mends(step: WatchedStep, policy: Policy, modules: Sequence[str], action: str) -> None:
    """Warn of a fault, or raise `AutoprecError` where `action` is "raise", with what to do."""
    advice = f"keep {named(modules)} in float32: float32_modules in the profile"
    if not modules:
        advice = "no few modules in float32 mend that, so train in float32"
    advice += ', or say watch="float32" where the profile is applied'
    if action == "raise":
        raise AutoprecError(f"{fault(step, policy)}. To go on, {advice}")
    _warn(f"{fault(step, policy)}. It may not train as float32 does; {advice}")


def told_what_is_mended(step: WatchedStep, policy: Policy, done: str) -> None:
    """Warn of a fault and of what is kept in float32 because of it."""
    _warn(f"{fault(step, policy)}. From the next update on {done} is kept in float32")


def _warn(text: str) -> None:
    silence = "To silence: watch=False, or filter autoprec.errors.AutoprecWarning"
    warnings.warn(f"{text}. {silence}", AutoprecWarning, stacklevel=3)
