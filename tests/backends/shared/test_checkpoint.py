"""Checkpoints are kept as far as main memory has room for them."""

from __future__ import annotations

from autoprec.backends.shared.checkpoint import MAX_CHECKPOINT_BYTES, affordable_steps


def test_a_large_model_keeps_fewer_checkpoints_the_first_and_the_last_before_others():
    steps = frozenset({0, 2, 8, 29})
    assert affordable_steps(steps, 1) == steps
    assert affordable_steps(steps, MAX_CHECKPOINT_BYTES // 6) == {0, 29, 8}
    assert affordable_steps(steps, MAX_CHECKPOINT_BYTES // 4) == {0, 29}
    assert affordable_steps(steps, MAX_CHECKPOINT_BYTES * 4) == {0}
    assert affordable_steps(frozenset(), 1) == frozenset()
