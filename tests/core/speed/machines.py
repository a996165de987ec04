"""Machines made by hand, whose rates are known, for the tests of the search."""

from __future__ import annotations

import math
import random

from hypothesis import strategies as st

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.speed.acquisition import Next, next_point
from autoprec.core.speed.space import BATCH, Space, powers_of_two
from autoprec.core.speed.stopping import Limits
from autoprec.core.speed.trial_results import Outcome, Status

SPACE = Space(
    (Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16),
    powers_of_two(8, 256),
    memory_formats=("contiguous", "channels_last"),
)

BASELINE = {"policy": "float32", "memory_format": "contiguous", "compile": False, BATCH: 32}

SPEED = {"float32": 1.0, "mixed_bfloat16": 2.0, "mixed_float16": 0.01}

LIMITS = Limits()

LONG = powers_of_two(8, 1024)


def at(batch=32, policy="float32", **others):
    return {**BASELINE, "policy": policy, **others, BATCH: batch}


def measured(point, rate, *, peak=0, width=0.01):
    step = point[BATCH] / rate
    low, high = step * (1 - width / 2), step * (1 + width / 2)
    return Outcome(point, Status.OK, Measurement(step, low, high, 8, point[BATCH], peak))


def true_rate(point):
    layout = 1.1 if point["memory_format"] == "channels_last" else 1.0
    return 1000 * SPEED[point["policy"]] * layout * point[BATCH] / (point[BATCH] + 32)


class Machine:
    """A device with noise, a memory, and failures by chance."""

    def __init__(self, seed=0, *, noise=0.0, memory=math.inf, failing=0.0):
        self._draw = random.Random(seed)
        self._noise, self._memory, self._failing = noise, memory, failing

    def run(self, point):
        peak = 1000 + 10 * point[BATCH]
        if peak > self._memory:
            return Outcome(point, Status.OUT_OF_MEMORY, reason="no memory")
        if self._draw.random() < self._failing:
            failures = [s for s in Status if s is not Status.OK]
            return Outcome(point, self._draw.choice(failures), reason="bad luck")
        factor = math.exp(self._draw.gauss(0, self._noise))
        return measured(point, true_rate(point) * factor, peak=peak)


def search(machine, limits=LIMITS, space=SPACE):
    """Run the search to its end; return the history and why it stopped."""
    history = []
    while isinstance(decision := next_point(space, BASELINE, history, limits), Next):
        assert len(history) <= len(space.points())
        history.append(machine.run(decision.point))
    return history, decision


machines = st.builds(
    Machine,
    st.integers(0, 2**32),
    noise=st.sampled_from([0.0, 0.02, 0.2]),
    memory=st.sampled_from([math.inf, 2000, 1400]),
    failing=st.sampled_from([0.0, 0.2, 0.9]),
)

SIZES = powers_of_two(8, 256)

ONE = Space((Policy.FLOAT32,), SIZES)

TWO = Space((Policy.FLOAT32, Policy.MIXED_BFLOAT16), SIZES)


def law(size, speed=1000.0):
    return speed * size / (size + 32)


def ran(sizes, policy="float32", speed=1000.0, *, flat=False, **others):
    """Outcomes on the law, or all at one speed."""
    rates = {size: speed if flat else law(size, speed) for size in sizes}
    return [measured(at(size, policy, **others), rate) for size, rate in rates.items()]
