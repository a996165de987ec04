"""Slow steps: a proof trains at a smaller batch, and compares single steps at the recipe's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoprec.core.numerics.proof_steps import ProofLength, has_ended
from autoprec.core.numerics.traces import Trajectory
from autoprec.errors import TaskError
from autoprec.tuning.proof.recipe_proof import Proof
from tests.tuning.proof.fake_tracer import BFLOAT16, FLOAT16, FakeTracer

LARGE = replace(BFLOAT16, batch_size=512)
SECONDS = 1.3 / 512
"""Of a sample: a step of the large batch takes 1.3 s, and one of 32 samples 0.08 s."""


class Proportional(FakeTracer):
    """Steps that take as long as they have samples; notes the batches of all it is asked for."""

    def __init__(self, fails: Any = None, **known: Any) -> None:
        super().__init__(**known)
        self.fails = fails
        self.trained: set[int] = set()
        self.single: set[int] = set()
        self.scaled: set[int] = set()

    def reference(self, *, batch_size: int, compared_batch: int, **known: Any) -> Trajectory:
        self.step_seconds = SECONDS * batch_size
        run = super().reference(batch_size=batch_size, **known)
        if has_ended(run.losses, known["steps"]):  # rather than ran out of time, to tell the pace
            self.trained.add(batch_size)
            self.single.add(compared_batch)
        return run

    def compare_steps(self, *, recipe: Any) -> Any:
        self.single.add(recipe.batch_size)
        return super().compare_steps(recipe=recipe)

    def trajectory(self, *, recipe: Any, **known: Any) -> Trajectory:
        self.step_seconds = SECONDS * recipe.batch_size
        pace = known["steps"] == 9
        if pace and recipe.batch_size < 512 and isinstance(self.fails, Exception):
            raise self.fails
        run = super().trajectory(recipe=recipe, **known)
        if pace and recipe.batch_size < 512 and self.fails == "nan":
            return replace(run, losses=(None, *run.losses[1:]))
        if not pace:
            self.trained.add(recipe.batch_size)
        return run

    def backward_exponents(self, *, recipe: Any, batches: int) -> Any:
        self.scaled.add(recipe.batch_size)
        return super().backward_exponents(recipe=recipe, batches=batches)


def test_a_large_batch_trains_at_a_smaller_one_and_is_compared_at_its_own():
    tracer, chosen = Proportional(), {}
    verdict = Proof(tracer, chosen=chosen).prove(LARGE)
    assert verdict.accepted
    assert (tracer.trained, tracer.single) == ({32}, {512})
    assert chosen == {"512x1": ProofLength(30, 32)}  # of 512, eight steps are all that fits
    assert (verdict.most_steps, verdict.trained_batch) == (30, 32)
    assert verdict.covered[-1] == "trainings of 30 steps at batch 32"
    assert "; trained at batch 32" in verdict.reason


def test_a_batch_whose_steps_are_fast_trains_at_its_own():
    tracer = Proportional()
    verdict = Proof(tracer).prove(replace(BFLOAT16, batch_size=32))
    assert (tracer.trained, tracer.single, verdict.trained_batch) == ({32}, {32}, 0)
    assert "at batch" not in verdict.reason + verdict.covered[-1]


def test_the_loss_scale_is_chosen_where_training_needs_it():
    tracer = Proportional()
    Proof(tracer).tune_loss_scale(replace(FLOAT16, batch_size=512))
    assert tracer.scaled == {32}  # gradients of a mean over fewer samples are larger


@pytest.mark.parametrize("fails", [TaskError("not so few"), ValueError("not so few"), "nan"])
def test_a_task_that_does_not_train_at_the_smaller_batch_trains_at_its_own(fails):
    tracer = Proportional(fails)
    verdict = Proof(tracer).prove(LARGE)
    assert tracer.trained == {512}
    assert (verdict.most_steps, verdict.trained_batch) == (8, 0)


def test_what_is_not_the_tasks_fault_goes_on_up():
    with pytest.raises(MemoryError):
        Proof(Proportional(MemoryError())).prove(LARGE)


def test_a_repeated_proof_trains_at_the_batch_that_it_is_told():
    tracer = Proportional()
    verdict = Proof(tracer, steps=30, trained_batch=32).prove(LARGE)
    assert (tracer.trained, verdict.trained_batch) == ({32}, 32)
    assert Proof(Proportional(), steps=30).prove(LARGE).trained_batch == 0
    assert Proof(Proportional(), steps=30, trained_batch=999).prove(LARGE).trained_batch == 0
