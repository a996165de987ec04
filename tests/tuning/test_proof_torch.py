"""The proof on tasks of the zoo, trained for real: broken ones are never accepted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from autoprec.backends.base import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.tuning.proof import Proof
from autoprec.tuning.taskfile import load_task

pytestmark = pytest.mark.torch

ZOO = Path(__file__).parents[1] / "zoo"
BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16, 32)
FLOAT16 = Recipe(Policy.MIXED_FLOAT16, 32, loss_scale=LossScale())


def silent(phase: str, step: int) -> None:
    pass


@cache
def zoo(name: str) -> Task:
    return load_task(ZOO / f"{name}.py")


def proof_of(name: str) -> Proof:
    """A proof with time for everything: what a busy machine has time for is not tested here."""
    task = zoo(name)
    return Proof(TorchBackend().tracer(task, device="cpu", seed=0, report=silent), seconds=1000.0)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.syspath_prepend(str(ZOO))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_plain_classifier_trains_like_float32_in_both():
    proof = proof_of("mlp_classifier")
    assert proof.prove(BFLOAT16).accepted
    scale, evidence = proof.tune_loss_scale(FLOAT16)
    assert evidence.skipped_steps == 0
    assert proof.prove(Recipe(Policy.MIXED_FLOAT16, 32, loss_scale=scale)).accepted


@pytest.mark.parametrize("name", ["float_positions", "far_positions", "distances"])
def test_what_breaks_silently_in_bfloat16_is_never_accepted(name):
    verdict = proof_of(name).prove(BFLOAT16)
    assert not verdict.accepted
    assert verdict.step is not None


def test_a_loss_that_turns_nan_in_float16_is_rejected():
    assert proof_of("large_scores").prove(FLOAT16).verdict == "rejected"


def test_the_culprit_is_kept_in_float32_and_the_rest_is_not():
    task = zoo("large_scores")
    facts = TorchBackend().describe(task, device="cpu", seed=0, batch_size=32, report=silent)
    found = proof_of("large_scores").find_islands(FLOAT16, facts.units)
    assert found.recipe is not None
    assert found.products < 0.5
    assert found.verdict.accepted


def test_positions_that_pass_through_a_weight_are_not_excused_by_noise_on_it():
    assert not proof_of("step_counter").prove(BFLOAT16).accepted


def test_an_overflow_to_come_is_seen_in_numbers_that_grow():
    proof = proof_of("growing_norm")
    scale, _ = proof.tune_loss_scale(FLOAT16)
    verdict = proof.prove(Recipe(Policy.MIXED_FLOAT16, 32, loss_scale=scale))
    assert verdict.verdict == "drift"
    assert "largest float16 number" in verdict.reason


def test_numbers_that_grow_and_stop_below_the_limit_keep_no_matrix_product_in_float32():
    proof = proof_of("growing_norm")
    scale, _ = proof.tune_loss_scale(FLOAT16)
    facts = TorchBackend().describe(
        zoo("growing_norm"), device="cpu", seed=0, batch_size=32, report=silent
    )
    found = proof.find_islands(replace(FLOAT16, loss_scale=scale), facts.units)
    assert found.recipe is not None
    assert found.recipe.float32_modules == ("norm",)
    assert found.products == 0.0


def test_code_that_float16_makes_raise_is_rejected_and_mended_by_an_island():
    task, proof = zoo("masked_fill"), proof_of("masked_fill")
    scale, evidence = proof.tune_loss_scale(FLOAT16)
    assert "raises" in evidence.note
    assert proof.prove(Recipe(Policy.MIXED_FLOAT16, 32, loss_scale=scale)).verdict == "rejected"
    facts = TorchBackend().describe(task, device="cpu", seed=0, batch_size=32, report=silent)
    found = proof.find_islands(FLOAT16, facts.units)
    assert found.recipe is not None
    assert found.products == 0.0


def test_tiny_gradients_train_at_the_tuned_scale_and_not_at_the_usual_one():
    proof = proof_of("tiny_gradients")
    usual = Recipe(Policy.MIXED_FLOAT16, 32, loss_scale=LossScale(initial=2.0**16))
    assert not proof.prove(usual).accepted
    scale, evidence = proof.tune_loss_scale(usual)
    assert evidence.exponent > 30
    assert proof.prove(Recipe(Policy.MIXED_FLOAT16, 32, loss_scale=scale)).accepted
