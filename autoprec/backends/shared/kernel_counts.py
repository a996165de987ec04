"""Counts the kernels of a step, with the bytes that grow with the batch and those that do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from autoprec.core.measurement import Kernel


class KernelCounts:
    """Equal kernels of one forward and backward pass over `samples` samples.

    `weight_shapes` tell what is shaped as a weight's gradient: such a tensor does not grow with the
    batch, unless a size of it is the batch's.
    """

    def __init__(self, weight_shapes: Iterable[Sequence[int]], samples: int) -> None:
        self._samples = samples
        shapes = {tuple(sorted(shape)) for shape in weight_shapes}
        self._gradient_shapes = {shape for shape in shapes if samples not in shape}
        self._counts: Counter[tuple[int, int, int]] = Counter()

    def is_gradient_shape(self, shape: Sequence[int]) -> bool:
        """Say whether a tensor of `shape`, transposed or not, may be a weight's gradient."""
        return tuple(sorted(shape)) in self._gradient_shapes

    def add(self, flops: int, growing_bytes: int, fixed_bytes: int) -> None:
        """Count one kernel: its operations, and the bytes of its operands and results."""
        self._counts[flops, growing_bytes, fixed_bytes] += 1

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels, operations and growing bytes for one sample."""
        return tuple(
            Kernel(flops / self._samples, growing / self._samples, fixed, count)
            for (flops, growing, fixed), count in self._counts.items()
        )
