"""What `autoprec tune --explain` says of each module."""

from __future__ import annotations

import pytest
from rich.console import Console

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import OperatorTime
from autoprec.core.numerics.traces import UnitTrace
from autoprec.core.recipe import LossScale, Recipe
from autoprec.reporting.explain import (
    explain_table,
    in_float32,
    magnitude_text,
    operators_table,
    scale_exponent,
    why,
)

FLOAT16 = Recipe(
    Policy.MIXED_FLOAT16, 32, float32_modules=("norm",), loss_scale=LossScale(initial=2.0**12)
)
BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16, 32)


def shown(units, recipe) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(explain_table(units, recipe))
    return capture.get()


def test_each_module_has_a_row_with_its_magnitudes_at_the_loss_scale():
    lines = shown([UnitTrace("", 3, -2, 0.0), UnitTrace("norm", 9, None, 0.25)], FLOAT16)
    title, head, root, norm = lines.splitlines()
    assert "mixed_float16 at loss scale 2^12" in title
    assert head.split()[:4] == ["module", "forward", "backward", "underflow"]
    assert "the model itself" in root
    assert "2^10" in root
    assert "float16" in root
    assert "25 %" in norm
    assert "float32" in norm


OPERATORS = (
    OperatorTime("aten::mm", "bfloat16", 0.5),
    OperatorTime("aten::log_softmax", "float32", 0.04),
    OperatorTime("aten::exp", "float32", 0.02),
    OperatorTime("aten::addcdiv_", "float32", 0.4, updates=True),
)


def test_operators_in_float32_are_named_but_for_the_update_which_is_always():
    console = Console(width=200)
    with console.capture() as capture:
        console.print(operators_table(OPERATORS))
    head, first, *_, last = capture.get().splitlines()
    assert head.split() == ["operator", "share", "runs", "in"]
    assert first.split() == ["aten::mm", "50", "%", "bfloat16"]
    assert last.split() == ["aten::addcdiv_", "40", "%", "float32", "(update)"]
    told = in_float32(OPERATORS, BFLOAT16)
    assert told.startswith("6 % of the step is in operators whose inputs are float32, although")
    assert "bfloat16: aten::log_softmax 4 %, aten::exp 2 %. Autocast keeps" in told
    assert in_float32(OPERATORS[:1], BFLOAT16).startswith("besides the update, every operator")
    assert in_float32(OPERATORS, Recipe(Policy.TF32)) == ""


def test_an_island_says_why_it_is_one():
    assert "trains like float32 only with this module" in why(UnitTrace("norm", 3, -2), FLOAT16)
    assert why(UnitTrace("head", 3, -2), FLOAT16) == ""


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        (12, -9, ""),
        (13, -9, "outputs near float16's limit of 2^16"),
        (16, None, "outputs beyond float16's limit of 2^16"),
        (None, 2, "gradients near float16's limit of 2^16"),
        (20, 9, "outputs beyond float16's limit of 2^16 and gradients beyond"),
    ],
)
def test_numbers_near_the_limit_are_pointed_out(forward, backward, expected):
    found = why(UnitTrace("head", forward, backward), FLOAT16)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_underflow_is_said_where_it_matters():
    assert "30 % of its gradient is too small" in why(UnitTrace("head", 1, 1, 0.3), FLOAT16)
    assert why(UnitTrace("head", 1, -5, 1e-4), FLOAT16) == ""


def test_bfloat16_has_no_limit_to_be_near_to():
    assert why(UnitTrace("head", 40, 40, 0.9), BFLOAT16) == ""
    assert scale_exponent(BFLOAT16) == 0
    assert "loss scale" not in shown([UnitTrace("head", None, None)], BFLOAT16)


def test_magnitudes_are_powers_of_two():
    assert magnitude_text(-7) == "2^-7"
    assert magnitude_text(None) == "none"


def test_a_module_name_cannot_drive_the_terminal():
    assert "\x1b" not in shown([UnitTrace("a\x1b[31m", 1, 1)], BFLOAT16)
