"""When float16 gets trials on a device where bfloat16 is as fast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.speed.float16 import float16_waits
from autoprec.core.speed.space import Space, powers_of_two
from autoprec.core.speed.trial_results import Outcome, Status
from tests.core.speed.machines import LIMITS, Machine, at, law, measured, search

F32, BF16, F16 = Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16
SPACE = Space((BF16, F16, F32), powers_of_two(8, 256), float16_waits=True)
TRIED = {o: Outcome(at(policy=BF16.value), o, reason="why") for o in Status if o is not Status.OK}
TOO_LARGE = (Status.OUT_OF_MEMORY, Status.WOULD_NOT_FIT, Status.KILLED)


class Gpu(Machine):
    """A device on which bfloat16 is `speed` times as fast as float32, or ends with a status."""

    def __init__(self, speed: float | Status) -> None:
        super().__init__()
        self.speed = speed

    def run(self, point):
        if point["policy"] == BF16.value and isinstance(self.speed, Status):
            return Outcome(point, self.speed, reason="why")
        speeds = {F32.value: 1.0, BF16.value: self.speed, F16.value: 1.9}
        return measured(point, law(int(point["batch_size"]), 1000.0 * speeds[point["policy"]]))


def policies(speed: float | Status, space: Space = SPACE) -> list[str]:
    """The policies of all trials, in their order, each once."""
    history, _ = search(Gpu(speed), LIMITS, space)
    return list(dict.fromkeys(str(outcome.point["policy"]) for outcome in history))


def test_float16_is_left_out_where_bfloat16_is_faster_than_float32() -> None:
    assert policies(2.0) == ["float32", "mixed_bfloat16"]
    assert policies(2.0, replace(SPACE, float16_waits=False)) == [
        "float32",
        "mixed_bfloat16",
        "mixed_float16",
    ]


@pytest.mark.parametrize("speed", [0.8, 1.0, Status.UNSUPPORTED, Status.CRASHED])
def test_float16_is_tried_after_bfloat16_that_is_slow_or_fails(speed: float | Status) -> None:
    assert policies(speed) == ["float32", "mixed_bfloat16", "mixed_float16"]


@pytest.mark.parametrize("status", TRIED)
def test_a_batch_that_is_too_large_says_nothing_of_bfloat16(status: Status) -> None:
    history = [measured(at(), 1000.0), TRIED[status]]
    assert float16_waits(SPACE, history) == (status in TOO_LARGE)


def test_one_trial_that_gains_is_enough_and_none_is_too_few() -> None:
    slow = [measured(at(), 1000.0), measured(at(policy=BF16.value), 900.0)]
    more = [measured(at(64), 1100.0), measured(at(64, BF16.value), 1200.0)]
    assert float16_waits(SPACE, [])
    assert float16_waits(SPACE, slow[:1])
    assert not float16_waits(SPACE, slow)
    assert float16_waits(SPACE, [*slow, *more])


def test_what_was_begun_with_float16_is_gone_on_with() -> None:
    history = [measured(at(), 1000.0), measured(at(policy=BF16.value), 2000.0)]
    begun = measured(at(policy=F16.value), 1900.0)
    assert float16_waits(SPACE, history)
    assert not float16_waits(SPACE, [*history, begun])
