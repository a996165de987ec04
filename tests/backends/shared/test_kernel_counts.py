"""Equal kernels are counted together, for one sample where they grow with the batch."""

from __future__ import annotations

from autoprec.backends.shared.kernel_counts import KernelCounts
from autoprec.core.measurement import Kernel


def test_equal_kernels_are_counted_together():
    counts = KernelCounts([], samples=4)
    for flops, growing, fixed in ((80, 40, 7), (80, 40, 7), (0, 8, 0)):
        counts.add(flops, growing, fixed)
    assert counts.kernels() == (Kernel(20.0, 10.0, 7, 2), Kernel(0.0, 2.0, 0, 1))


def test_what_is_shaped_as_a_weight_is_its_gradient_unless_a_size_is_the_batch_s():
    counts = KernelCounts([(6, 16), (8, 16)], samples=8)
    assert counts.is_gradient_shape((6, 16))
    assert counts.is_gradient_shape([16, 6])
    assert not counts.is_gradient_shape((8, 16))
    assert not counts.is_gradient_shape((6,))
