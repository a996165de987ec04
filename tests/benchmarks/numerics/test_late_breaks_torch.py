"""Late breaks: what is trained again from the alarm on, and what their table says."""

from __future__ import annotations

import pytest

from autoprec.core.dtypes import Policy
from benchmarks.numerics.late_breaks import BFLOAT16, QUICK, table
from benchmarks.numerics.late_breaks_torch import trained

pytestmark = pytest.mark.torch


def test_a_training_becomes_plain_float32_with_the_check_of_an_update() -> None:
    how = {"watch": "warn", "every": 4, "updates": 9}
    _, low = trained("ratio", BFLOAT16, QUICK, **how)
    precision, mixed = trained("ratio", BFLOAT16, QUICK, **how, float32_from=5)
    assert mixed[:5] == low[:5]
    assert mixed[5:] != low[5:]
    assert precision.policy is Policy.FLOAT32


def test_what_no_mend_brings_back_is_told_apart_from_what_is_not_mended() -> None:
    about = {"framework": "torch", "policy": "mixed_bfloat16", "alarm": 210, "noise": 0.01}
    ends = {"float32": 1.0, "unwatched": None}
    rows = [
        {**about, **ends, "break": "one", "watched": 1.5, "from_alarm": 1.49} | verdict
        for verdict in ({"rescued": False, "mended": True}, {"rescued": False, "mended": False})
    ]
    lines = list(table(rows))
    told = "| torch | one | mixed_bfloat16 | 210 | 1 (noise: 1 %) | not finite | 1.5 | 1.49 | no |"
    assert lines[2] == told
    assert "rescued 0 of 2" in lines[-1]
    assert "ends as float32 does from the alarm on: 1 of 2" in lines[-1]
