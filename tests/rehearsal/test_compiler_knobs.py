"""What a plan for a pretended GPU says of the compiler's knobs and of attention."""

from __future__ import annotations

from typing import Any

import pytest

from rehearsal.jobs import TASKS

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.release]


def test_attention_is_to_choose_from_and_graphs_are_refused_for_a_split_batch(
    rehearse: Any,
) -> None:
    words = ("--knob", "compile_mode=reduce-overhead", "--batch-sizes", "8")
    plan = rehearse("cuda").autoprec("tune", TASKS / "stack.py", "--plan", *words)
    assert plan.returncode == 0, plan.stderr
    lost = "a split batch's gradients do not survive the CUDA graphs of that mode"
    assert f"reduce-overhead left out: {lost}" in plan.stdout, plan.stdout
    assert "attention: 4" in plan.stdout, plan.stdout
    assert f"compile_mode reduce-overhead refused: {lost}" in plan.stdout, plan.stdout
    assert "compile_mode: 2" not in plan.stdout, plan.stdout
