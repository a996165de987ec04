"""One check of a training: the runs of a caught call that are compared, on how many samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from autoprec.backends.torch.watch.caught_call import CaughtCall
from autoprec.backends.torch.watch.differences import difference, is_repeated
from autoprec.backends.torch.watch.live_islands import units_of
from autoprec.backends.torch.watch.repeated_call import RepeatedCall, Run
from autoprec.core.dtypes import DType, Policy
from autoprec.core.numerics.islands import needed_islands
from autoprec.core.numerics.tolerance import Tolerance, finite_or_none
from autoprec.core.numerics.watching import (
    MOST_NOISE,
    Difference,
    WatchedStep,
    judge,
    worst_modules,
)

Result = TypeVar("Result")

_NOISE_DRAWS = 2

_FULL = "there is not enough memory for a second pass"


class Check:
    """Compares `call` with float32; everything happens inside `nothing_changed`.

    `share` and `floor` are those of `difference`.

    `overflowed` says that only the backward pass was not finite, in float16: the loss scale's
    business.
    """

    def __init__(
        self,
        root: nn.Module,
        call: CaughtCall,
        *,
        policy: Policy,
        device_type: str,
        share: float,
        floor: float,
    ) -> None:
        self._root, self._call, self._device_type = root, call, device_type
        self._float16 = policy.compute_dtype is DType.FLOAT16
        self._roundoff = policy.compute_dtype.limits.unit_roundoff
        self._share, self._floor = share, floor
        self._samples = call.samples
        self._exact: Run | None = None
        self._noise: list[Difference] | None = None
        self.overflowed = False

    def made(self, step: WatchedStep) -> WatchedStep:
        """Return `step` with what was found."""
        found, why = self._compared()
        if found is None:
            return replace(step, not_checked=why)
        self.overflowed = self._float16 and found.overflows_backward_only
        if self.overflowed:
            found = replace(found, gradient=0.0, modules={}, vanished=0.0)
        problem, unsaid = self._problem_or_why_none(found)
        parts = f"of {self._call.batch} samples {self._samples} fit in memory"
        partly = parts if self._samples < self._call.batch else ""
        return replace(
            step,
            samples=self._samples,
            outputs=finite_or_none(found.outputs),
            loss=None if found.loss is None else finite_or_none(found.loss),
            gradient=None if self.overflowed else finite_or_none(found.gradient),
            vanished=None if self.overflowed else found.vanished,
            problem=problem,
            modules=worst_modules(found) if problem else (),
            not_checked=unsaid or partly,
        )

    def mending(
        self,
        with_islands: Callable[[tuple[str, ...]], None],
        on_all_ranks: Callable[[bool], bool],
    ) -> tuple[str, ...]:
        """Search modules that are needed in float32 for this call; empty where none help.

        `with_islands` sets those that are tried in addition; of the last call of it, none. Ranks
        search together, by what is so `on_all_ranks`: a pass may need all of them.
        """

        def passes(paths: tuple[str, ...]) -> bool:
            with_islands(paths)
            found, _, _ = self._attempt(Check._low_against_exact)
            mends = found is not None and not self._problem_or_why_none(found)[0]
            return on_all_ranks(mends)

        try:
            return needed_islands(list(units_of(self._root)), passes)
        finally:
            with_islands(())

    def _problem_or_why_none(self, found: Difference) -> tuple[str, str]:
        """Say what is wrong, with noise where there is doubt, or why that cannot be told."""
        problem = judge(found, (), Tolerance(), self._roundoff)
        if not problem or math.isinf(found.outputs):
            return problem, ""
        if self._noise is None and not self._repeated().can_be_noisy:
            self._noise = [MOST_NOISE]
        if self._noise is None:
            noise, why, _ = self._attempt(Check._noise_against_exact)
            if noise is None:
                return "", f"what noise does is not known: {why}"
            self._noise = noise
        return judge(found, self._noise, Tolerance(), self._roundoff), ""

    def _compared(self) -> tuple[Difference | None, str]:
        """Compare as many samples as fit."""
        while True:
            found, why, full = self._attempt(Check._first_comparison)
            if found is not None or not full or not self._call.can_be_cut or self._samples < 2:
                return found, why
            self._samples //= 2

    def _first_comparison(self) -> Difference:
        low = self._repeated().low()
        if self._samples == self._call.batch and not is_repeated(low, self._call):
            raise _NotRepeated(
                "the call cannot be repeated: it reads state that is kept out of sight, or draws "
                "random numbers elsewhere"
            )
        self._exact = self._repeated().exact()
        return self._difference(low)

    def _low_against_exact(self) -> Difference:
        return self._difference(self._repeated().low())

    def _noise_against_exact(self) -> list[Difference]:
        return [self._difference(self._repeated().noisy(draw)) for draw in range(_NOISE_DRAWS)]

    def _repeated(self) -> RepeatedCall:
        return RepeatedCall(self._root, self._call, self._device_type, self._samples)

    def _difference(self, run: Run) -> Difference:
        assert self._exact is not None
        return difference(
            run,
            self._exact,
            self._call,
            samples=self._samples,
            share=self._share,
            floor=self._floor,
        )

    def _attempt(self, run: Callable[[Check], Result]) -> tuple[Result | None, str, bool]:
        """Return what a run gives, or None, why, and whether memory was full."""
        try:
            return run(self), "", False
        except Exception as error:  # a check never ends a training
            text = str(error).partition("\n")[0]
            full = isinstance(error, MemoryError | torch.OutOfMemoryError)
            full = full or "allocate memory" in text
            why = text if isinstance(error, _NotRepeated) else f"{type(error).__name__}: {text}"
        return None, _FULL if full else why, full


class _NotRepeated(Exception):
    """A repeated call gives something else than the call did."""
