"""One check of a training: the runs of a caught call that are compared, on how many samples."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from autoprec.backends.shared.watching import NO_MEMORY, NOT_REPEATED, partly
from autoprec.backends.torch.watch.caught_call import CaughtCall
from autoprec.backends.torch.watch.differences import difference, is_repeated
from autoprec.backends.torch.watch.live_islands import units_of
from autoprec.backends.torch.watch.repeated_call import RepeatedCall, Run
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.island_proposals import needed_islands
from autoprec.core.numerics.watching import MOST_NOISE, Difference, StepJudge, WatchedStep
from autoprec.errors import first_line

Result = TypeVar("Result")

_NOISE_DRAWS = 2


class Check:
    """Compares `call` with float32; everything happens inside `nothing_changed`.

    `share` and `floor` are those of `difference`; of the modules `lost` weights are not finite.
    What is `compiled` draws random numbers of its own: there it is enough that both runs, which are
    eager, draw the same ones.
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
        lost: Sequence[str],
        compiled: bool = False,
    ) -> None:
        self._compiled, self._lost = compiled, lost
        self._root, self._call, self._device_type = root, call, device_type
        self._share, self._floor = share, floor
        self._samples = call.samples
        self._exact: Run | None = None
        own = weakref.proxy(self)

        def noise() -> Sequence[Difference] | str:  # no cycle keeps what may fill a device
            made: Sequence[Difference] | str = own._noise()
            return made

        self._judge = StepJudge(policy, noise)

    @property
    def undecided(self) -> bool:
        """See `StepJudge`."""
        return self._judge.undecided

    def made(self, step: WatchedStep) -> WatchedStep:
        """Return `step` with what was found on as many samples as fit.

        Where weights are `lost`, on any rank, none of them runs the model.
        """
        if self._lost:
            nothing = Difference.without_weights(self._lost)
            return self._judge.judged(replace(step, samples=self._samples), nothing)
        while isinstance(found := _attempt(self._first_comparison), _Failed):
            if not found.full or not self._call.can_be_cut or self._samples < 2:
                return replace(step, not_checked=found.why)
            self._samples //= 2
        part = partly(self._samples, self._call.batch)
        return self._judge.judged(replace(step, samples=self._samples, not_checked=part), found)

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
            found = _attempt(lambda: self._difference(self._repeated().low()))
            return on_all_ranks(not isinstance(found, _Failed) and not self._judge.problem(found))

        try:
            return needed_islands(list(units_of(self._root)), passes)
        finally:
            with_islands(())

    def _first_comparison(self) -> Difference:
        low = self._repeated().low()
        if self._samples == self._call.batch and not self._is_repeatable(low):
            raise _NotRepeated(NOT_REPEATED)
        self._exact = self._repeated().exact()
        return self._difference(low)

    def _is_repeatable(self, low: Run) -> bool:
        same = is_repeated(low, self._call.sampled)
        if not self._compiled:
            return same
        again = self._repeated().low()  # on every rank, as a pass may need all of them
        return same or is_repeated(again, low.outputs)

    def _noise(self) -> Sequence[Difference] | str:
        if not self._repeated().can_be_noisy:
            return [MOST_NOISE]
        draws = range(_NOISE_DRAWS)
        made = _attempt(lambda: [self._difference(self._repeated().noisy(d)) for d in draws])
        return made.why if isinstance(made, _Failed) else made

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


class _NotRepeated(Exception):
    """A repeated call gives something else than the call did."""


class _Failed:
    """Why a run gave nothing, and whether memory was full."""

    def __init__(self, error: Exception) -> None:
        out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        self.full = out_of_memory or "allocate memory" in str(error)
        self.why = NO_MEMORY
        if not self.full:
            kind = "" if isinstance(error, _NotRepeated) else f"{type(error).__name__}: "
            self.why = f"{kind}{first_line(error)}"


def _attempt(run: Callable[[], Result]) -> Result | _Failed:
    """Return what a run gives, or why it failed: a check never ends a training."""
    try:
        return run()
    except Exception as error:
        return _Failed(error)
