"""What the precision plugins of Lightning's Trainer and of Fabric have in common."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from autoprec.core.numerics.watching import WatchedStep
from autoprec.integrations.seam import ForeignLoop

_XLA = ("XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")


class Plugin:
    """What the plugins of Trainer and Fabric share; `precision` is what strategies ask for."""

    precision = "32-true"

    def __init__(self, loop: ForeignLoop) -> None:
        super().__init__()
        self.loop = loop

    def __bool__(self) -> bool:
        """Refuse a strategy with a precision of its own; else true.

        Trainer and Fabric ask this of a plugin right before they give it to their strategy, and
        some of those raise a TypeError for what is not their own, which names no way out.
        """
        self._refuse(getattr(_caller(), "strategy", None))
        return True

    def __format__(self, spec: str) -> str:
        """Refuse a strategy that is given this as its own, where it is about to print it."""
        self._refuse(_caller())
        return super().__format__(spec)

    def _refuse(self, strategy: Any) -> None:
        facts = strategy_facts(strategy)
        if any(facts.values()):
            self.loop.require(facts)

    @property
    def batch_size(self) -> int:
        """Return what the loader should yield: the samples of one micro-batch on one device."""
        return self.loop.batch_size

    @property
    def accumulation_steps(self) -> int:
        """Return the micro-batches of one update."""
        return self.loop.accumulation_steps

    @property
    def skipped(self) -> int:
        """Return the number of updates skipped because gradients were not finite."""
        return self.loop.skipped

    @property
    def watched(self) -> tuple[WatchedStep, ...]:
        """Return the checks made during training so far."""
        return self.loop.watched

    def float32(self) -> Any:
        """Return a context without autocast, for a loss that needs full precision."""
        return self.loop.float32()

    def convert_input(self, data: Any) -> Any:
        """Lay a batch out as the profile says; its values stay as they are."""
        return self.loop.inputs(data)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, the counts and the checks."""
        return self.loop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load them."""
        self.loop.load_state_dict(state)

    def teardown(self) -> None:
        """Undo what was done to the model; the next `fit` does it again."""
        self.loop.detach()


def _caller() -> Any:
    """Return the object whose code asked a plugin something."""
    return sys._getframe(2).f_locals.get("self")


def strategy_facts(strategy: Any) -> dict[str, Any]:
    """Return what of a strategy with a precision of its own the table of refusals asks for."""
    names = {each.__name__ for each in type(strategy).__mro__}
    return {
        "fsdp1": "FSDPStrategy" in names,
        "deepspeed": "DeepSpeedStrategy" in names,
        "own_precision": next((name for name in _XLA if name in names), ""),
        "data_parallel": "DataParallelStrategy" in names,
    }


def closures_of(optimizer: Any) -> str:
    """Name the class of an optimizer that calls a training step several times in one update."""
    return "LBFGS" if any(each.__name__ == "LBFGS" for each in type(optimizer).__mro__) else ""
