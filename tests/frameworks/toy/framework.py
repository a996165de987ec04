"""A framework in sixty lines: one linear layer in plain Python, which can round like bfloat16.

A layer "on the device" takes time for every sample, half of it with 16-bit products.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

Batch = tuple[list[list[float]], list[float]]

SECONDS_PER_SAMPLE = 2e-4
MANTISSA_BITS = {"float32": 24, "bfloat16": 8, "float16": 11}


@dataclass(frozen=True)
class Gradient:
    """The gradient by the weights and by the bias, which comes last."""

    values: tuple[float, ...]

    def norm(self) -> float:
        return math.hypot(*self.values)


class Linear:
    """`features` weights and a bias; trained by plain SGD on the mean squared error."""

    def __init__(self, features: int) -> None:
        self.values = [random.gauss(0.0, 0.5) for _ in range(features + 1)]
        self.dtype = "float32"

    def loss_and_gradient(self, batch: Batch) -> tuple[float, Gradient]:
        """Compute products in `dtype`, everything else in Python's floats."""
        inputs, targets = batch
        *weights, bias = self.values
        loss, sums = 0.0, [0.0] * len(self.values)
        for row, target in zip(inputs, targets, strict=True):
            product = sum(
                self._round(self._round(w) * x) for w, x in zip(weights, row, strict=True)
            )
            error = product + bias - target
            loss += error**2
            for index, x in enumerate((*row, 1.0)):
                sums[index] += self._round(2 * error * x)
        count = len(targets)
        return loss / count, Gradient(tuple(each / count for each in sums))

    def step(self, gradient: Gradient, rate: float = 0.05) -> None:
        self.values = [v - rate * g for v, g in zip(self.values, gradient.values, strict=True)]

    def device_seconds(self, samples: int) -> float:
        """Return the seconds that a step takes on its device, and waits for none."""
        return samples * SECONDS_PER_SAMPLE * (1.0 if self.dtype == "float32" else 0.5)

    def _round(self, value: float) -> float:
        if self.dtype == "float32":
            return value
        mantissa, exponent = math.frexp(value)
        scale = 2 ** MANTISSA_BITS[self.dtype]
        return math.ldexp(round(mantissa * scale) / scale, exponent)


def endless_samples(batch_size: int, features: int = 4) -> Iterator[Batch]:
    """Yield batches of noisy values of one linear function."""
    truth = random.Random(7)
    weights = [truth.gauss(0.0, 1.0) for _ in range(features)]
    while True:
        inputs = [[random.gauss(0.0, 1.0) for _ in range(features)] for _ in range(batch_size)]
        yield (
            inputs,
            [
                sum(w * x for w, x in zip(weights, row, strict=True)) + random.gauss(0.0, 0.3)
                for row in inputs
            ],
        )
