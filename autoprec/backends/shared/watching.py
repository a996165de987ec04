"""What follows from the checks of a training, in all frameworks alike: when the next one is due,
what is done about a fault, what is said of it, and what is saved.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from autoprec.core.dtypes import Policy
from autoprec.core.numerics.tolerance import SMALLEST_LOSS_SHARE
from autoprec.core.numerics.watching import (
    CONFIRM_AFTER,
    FAILED_IN_A_ROW,
    WAITED_FOR,
    WatchedStep,
    confirm_after,
    fault_expected,
    named,
    next_check,
)
from autoprec.core.watch_settings import Action
from autoprec.errors import AutoprecError, AutoprecWarning

_WHERE = (
    "All checks are in precision.watched; `autoprec verify PROFILE --checkpoint FILE` judges "
    "weights that were saved"
)

NOT_REPEATED = (
    "the call cannot be repeated: it reads state that is kept out of sight, or draws random "
    "numbers elsewhere"
)
NO_MEMORY = "there is not enough memory for a second pass"

UNLIKE = 0.05
"""A repeated run this far from the call itself is of another computation: it keeps state that
nothing here knows of, or draws elsewhere."""

_SILENCE = "To silence: watch=False, or filter autoprec.errors.AutoprecWarning"


def warn_unwatched(why: str) -> None:
    """Warn that nothing of a training is checked, and why."""
    text = f"this training is not checked while it goes on: {why}. {_SILENCE}"
    warnings.warn(text, AutoprecWarning, stacklevel=4)


def partly(samples: int, batch: int) -> str:
    """Say that so many samples of a batch were checked; nothing if that is all of them."""
    return f"of {batch} samples {samples} fit in memory" if samples < batch else ""


class CheckLog:
    """The checks of one training under `policy`, and what is done about those that fail.

    With `before_steps` a check comes before its step, which may raise what kept the check from
    being made, and says that better: what is to be said of the check waits for `tell_unchecked`.
    `steps` are the checks so far, `due` is the number of the update that is checked next, and
    `mended` says whether modules are kept in float32 because of a check.
    """

    def __init__(
        self, policy: Policy, action: Action, every: int, *, before_steps: bool = False
    ) -> None:
        self._before_steps = before_steps
        self._policy, self._action, self._every = policy, action, every
        self.steps: list[WatchedStep] = []
        self.due, self.mended = 1, False
        self._failed = self._failed_size = self._wait = 0
        self._fault_before: WatchedStep | None = None
        self._first_loss = 0.0
        self._told: set[tuple[str, ...]] = set()
        self._unchecked: WatchedStep | None = None
        self._told_unchecked = False

    def note_loss(self, loss: float) -> None:
        """Note a loss of the training; the first one that is finite counts."""
        if not self._first_loss and math.isfinite(loss):
            self._first_loss = abs(loss)

    @property
    def floor(self) -> float:
        """Return the size that a smaller loss counts as where it divides."""
        return SMALLEST_LOSS_SHARE * self._first_loss

    def least_size(self, update: int) -> int:
        """Return the least elements that a batch must have for a check at `update`.

        A fault that only large batches have is not to be cleared by a small one.
        """
        return self._failed_size if update < self.due + WAITED_FOR else 0

    def leave_out(self, update: int, why: str) -> None:
        """Note that a check could not be made."""
        self._note(WatchedStep(update, not_checked=why))
        self.due = next_check(update, self._every)

    def _note(self, step: WatchedStep) -> None:
        """Add a check on which nothing is done; the first that told nothing is warned of."""
        self.steps.append(step)
        if not step.samples:
            self._unchecked = step
            if not self._before_steps:
                self.tell_unchecked()

    def tell_unchecked(self) -> None:
        """Warn of a check that could not be made; once in a training."""
        step, self._unchecked = self._unchecked, None
        if step is not None and not self._told_unchecked:
            self._told_unchecked = True
            self._warn(
                f"the check of update {step.updates} in {self._policy} could not be made: "
                f"{step.not_checked}. Where none can be, no fault is told; this is said once"
            )

    def repeats(self, step: WatchedStep) -> bool:
        """Return whether a check's fault may be that of the check before."""
        return step.repeats(self._fault_before)

    def fault_expected(self, step: WatchedStep) -> float:
        """Return the update at which a check will fail if outputs go on as they did.

        Those of checks before something was mended tell nothing of what comes after.
        """
        acted = [index for index, each in enumerate(self.steps) if each.action]
        return fault_expected(step, self.steps[acted[-1] + 1 if acted else 0 :])

    def is_acted_on(
        self,
        step: WatchedStep,
        size: int,
        *,
        failed: bool,
        repeats: bool,
        undecided: bool,
        certain: bool,
        expected: float,
    ) -> bool:
        """Plan the next check; note this one unless it is to be given to `act`.

        That is the second fault in a row, or one that is `certain`. After a fault, and where a
        check is `undecided`, the next one comes soon, and none comes later than a fault is
        `expected`. `size` is the batch's elements; whether a check `failed`, `repeats` the fault
        before, and so on, is what any rank found.
        """
        self._plan(step.updates, failed=failed, undecided=undecided)
        soonest = step.updates + confirm_after(step.updates, self._every)
        self.due = int(min(self.due, max(soonest, expected)))
        if failed:
            self._failed = (self._failed if repeats else 0) + 1
            self._failed_size, self._fault_before = size, step
        elif not undecided:
            self._failed, self._failed_size, self._fault_before = 0, 0, None
        if self._failed < FAILED_IN_A_ROW and not certain:
            self._note(step)
            return False
        self._failed = self._failed_size = self._wait = 0
        self._fault_before = None
        return True

    def _plan(self, updates: int, *, failed: bool, undecided: bool) -> None:
        """Set when the next check is due, after one of the update `updates`.

        Since a fault the updates to the next one double with every check that passes, until one is
        due anyway: rounding that grows is at first no fault in every batch.
        """
        self.due = next_check(updates, self._every)
        if failed:
            soon = confirm_after(updates, self._every)
            self._wait, self.due = self._wait or soon, updates + soon
        elif undecided:
            self.due = updates + min(CONFIRM_AFTER, self._every)
        elif self._wait and updates + 2 * self._wait < self.due:
            self._wait *= 2
            self.due = updates + self._wait
        else:
            self._wait = 0

    def act(
        self,
        step: WatchedStep,
        modules: tuple[str, ...],
        keep: Callable[[tuple[str, ...]], None],
        *,
        lost: bool,
    ) -> None:
        """Warn of a fault, raise, or let `keep` keep modules in float32: all of them by none.

        `modules` mend it; where a mended training fails again, all of them are kept. Nothing mends
        weights that are `lost`.
        """
        if self._action == "float32" and not lost:
            kept = () if self.mended else modules
            done = named(kept) if kept else "the whole model"
            keep(kept)
            self.mended = True
            self.steps.append(replace(step, modules=modules, action=f"{done} in float32"))
            self._warn(f"{self._fault(step)}. From the next update on {done} is kept in float32")
            return
        action = "warn" if self._action == "float32" else self._action
        self.due = next_check(step.updates, self._every)
        self.steps.append(replace(step, modules=modules, action=action))
        if modules in self._told:
            return
        self._told.add(modules)
        advice = self._advice_for(modules) if not lost else self._advice_for_lost_weights()
        if self._action == "raise":
            raise AutoprecError(f"{self._fault(step)}. To go on, {advice}. {_WHERE}")
        meaning = "Nothing mends them" if lost else "It may not train as float32 does"
        self._warn(f"{self._fault(step)}. {meaning}; {advice}")

    def _advice_for(self, modules: tuple[str, ...]) -> str:
        advice = f"keep {named(modules)} in float32: float32_modules in the profile"
        if not modules:
            advice = "no few modules in float32 mend that, so train in float32"
        return f'{advice}, or say watch="float32" where the profile is applied'

    def _advice_for_lost_weights(self) -> str:
        sound = [each.updates for each in self.steps if not (each.problem or each.not_checked)]
        passed = f" (a check passed after {sound[-1] - 1} updates)" if sound else ""
        return (
            f"go back to weights that were saved before that{passed}, and train on in float32, or "
            "with checks more often (watch_every)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the checks as plain values."""
        return {"first_loss": self._first_loss, "steps": [asdict(each) for each in self.steps]}

    def load_state_dict(self, state: Mapping[str, Any], updates: int) -> None:
        """Go on after so many `updates`; checks of another form than today's are left out."""
        known = {field.name for field in fields(WatchedStep)}
        saved: list[dict[str, Any]] = [each for each in state["steps"] if set(each) <= known]
        self.steps = [WatchedStep(**each | {"modules": tuple(each["modules"])}) for each in saved]
        self._first_loss = float(state["first_loss"])
        self._failed = self._failed_size = 0
        self.due = next_check(updates, self._every)

    def _fault(self, step: WatchedStep) -> str:
        """Say when a check failed, and what it found."""
        said = step.problem or "another rank's part of the batch is not what float32 computes"
        return f"after {step.updates - 1} updates in {self._policy} {said}"

    def _warn(self, text: str) -> None:
        warnings.warn(f"{text}. {_WHERE}. {_SILENCE}", AutoprecWarning, stacklevel=3)
