"""The float32 islands that make a rejected recipe pass."""

from __future__ import annotations

import pytest

from autoprec.tuning.proof.recipe_proof import Proof
from tests.tuning.proof.fake_tracer import BFLOAT16, FLOAT16, UNITS, FakeTracer


@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16])
def test_the_island_that_repairs_is_found_and_proven(recipe):
    events: list[tuple[str, int]] = []
    tracer = FakeTracer(error=0.01, step_error=0.1, culprits=("norm",))
    proof = Proof(tracer, on_event=lambda phase, step: events.append((phase, step)))
    found = proof.find_islands(recipe, UNITS)
    assert found.recipe.float32_modules == ("norm",)
    assert found.verdict.accepted
    assert found.products == 0.0
    assert "norm" in found.reason
    assert found.trials == len(events) <= 4


def test_matrix_products_are_islands_only_where_they_must_be():
    found = Proof(FakeTracer(error=0.01, culprits=("two",))).find_islands(BFLOAT16, UNITS)
    assert found.recipe.float32_modules == ("two",)
    assert found.products == 0.5


def test_islands_are_not_looked_for_when_the_time_is_over():
    tracer = FakeTracer(error=0.01, culprits=("two",))
    found = Proof(tracer, until=0.0).find_islands(BFLOAT16, UNITS)
    assert (found.recipe, found.trials, tracer.calls) == (None, 0, [])
    assert "time limit" in found.reason


def test_islands_that_hold_all_matrix_products_are_no_repair():
    found = Proof(FakeTracer(error=0.01, culprits=("one", "two"))).find_islands(BFLOAT16, UNITS)
    assert found.recipe is None
    assert found.products == 1.0
    assert "100 % of its matrix products" in found.reason


def test_where_nothing_repairs_it_the_units_that_were_tried_are_named():
    found = Proof(FakeTracer(error=0.01)).find_islands(BFLOAT16, UNITS)
    assert found.recipe is None
    assert found.verdict is None
    assert set(found.tried) == {unit.path for unit in UNITS}


def test_code_that_raises_while_its_scale_is_measured_gets_the_usual_one():
    proof = Proof(FakeTracer(raises=RuntimeError("not implemented for 'Half'\nmore")))
    scale, evidence = proof.tune_loss_scale(FLOAT16)
    assert scale.initial == 2.0**16
    assert evidence.note == "the task's own code raises under it: not implemented for 'Half'"
    assert evidence.largest_safe is None
    found = proof.find_islands(FLOAT16, UNITS)
    assert found.recipe is None


@pytest.mark.parametrize("method", ["tune_loss_scale", "find_islands"])
def test_a_full_memory_while_the_scale_is_measured_goes_on_up(method):
    proof = Proof(FakeTracer(raises=MemoryError()))
    arguments = (FLOAT16,) if method == "tune_loss_scale" else (FLOAT16, UNITS)
    with pytest.raises(MemoryError):
        getattr(proof, method)(*arguments)
