"""A run that has not begun has counted nothing, and saves that as plain numbers."""

from __future__ import annotations

import dataclasses

from autoprec.backends.shared.loss_scaling_counts import StepCounts


def test_counts_begin_at_zero_and_have_the_names_that_checkpoints_hold():
    names = ("steps", "skipped", "scale_drops", "scale_growths", "floor_hits")
    assert dataclasses.asdict(StepCounts()) == dict.fromkeys(names, 0)
