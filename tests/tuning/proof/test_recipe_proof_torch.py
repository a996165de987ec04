"""The proof on tasks of the zoo, trained for real: broken ones are never accepted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from autoprec.backends.protocol import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.task_file import load_task

pytestmark = pytest.mark.torch

ZOO = Path(__file__).parents[2] / "zoo"
FIELD = ZOO / "field"
BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16, 32)
FLOAT16 = Recipe(Policy.MIXED_FLOAT16, 32, loss_scale=LossScale())


def silent(phase: str, step: int) -> None:
    pass


@cache
def load(path: Path) -> Task:
    return load_task(path)


def zoo(name: str, folder: Path = ZOO) -> Task:
    return load(folder / f"{name}.py")


def proof_of(name: str, steps: int = 60, folder: Path = ZOO) -> Proof:
    """A proof of at most so many steps."""
    tracer = TorchBackend().tracer(zoo(name, folder), device="cpu", seed=0, report=silent)
    return Proof(tracer, steps=steps)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ZOO))
        patch.syspath_prepend(str(FIELD))
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


def test_a_loss_that_turns_nan_in_float16_is_rejected_and_its_culprit_alone_kept_in_float32():
    task, proof = zoo("large_scores"), proof_of("large_scores")
    assert proof.prove(FLOAT16).verdict == "rejected"
    facts = TorchBackend().describe(task, device="cpu", seed=0, batch_size=32, report=silent)
    found = proof.find_islands(FLOAT16, facts.units)
    assert found.recipe is not None
    assert found.products < 0.5
    assert found.verdict.accepted


def test_positions_that_pass_through_a_weight_are_not_excused_by_noise_on_it():
    assert not proof_of("step_counter").prove(BFLOAT16).accepted


@pytest.mark.slow
def test_what_shows_after_the_first_steps_is_caught_by_a_longer_proof():
    assert proof_of("learned_frequencies", 30, FIELD).prove(BFLOAT16).accepted
    late = proof_of("learned_frequencies", 240, FIELD).prove(BFLOAT16)
    assert late.verdict == "rejected"
    assert late.step == 240


def trained(task: Task, steps: int, file: Path) -> Task:
    """The task from the weights that so many plain float32 steps lead to."""
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    stream = itertools.chain.from_iterable(iter(lambda: task.build_data(32), None))
    for batch in itertools.islice(stream, steps):
        optimizer.zero_grad()
        task.training_step(model, batch).backward()
        optimizer.step()
    torch.save(model.state_dict(), file)
    return replace(task, checkpoint=file)


@pytest.mark.filterwarnings("ignore:step .* gradients are not finite at the loss scale")
@pytest.mark.parametrize(
    ("name", "recipe", "steps"),
    [("physics_informed", BFLOAT16, 500), ("log_of_chance", FLOAT16, 45)],
)
def test_what_shows_late_shows_soon_from_trained_weights(name, recipe, steps, tmp_path):
    fresh = zoo(name, FIELD)
    accepted = []
    for task in (fresh, trained(fresh, steps, tmp_path / "last.pt")):
        proof = Proof(TorchBackend().tracer(task, device="cpu", seed=0, report=silent), steps=30)
        scale = proof.tune_loss_scale(recipe)[0] if recipe.loss_scale else None
        accepted.append(proof.prove(replace(recipe, loss_scale=scale)).accepted)
    assert accepted == [True, False]


def test_a_proof_from_a_checkpoint_says_so(tmp_path):
    task = zoo("mlp_classifier")
    torch.save(task.build_model().state_dict(), tmp_path / "last.pt")
    tracer = TorchBackend().tracer(
        replace(task, checkpoint=tmp_path / "last.pt"), device="cpu", seed=0, report=silent
    )
    reason = Proof(tracer, steps=8, start="last.pt").prove(BFLOAT16).reason
    assert "equal over 8 steps from last.pt, loss" in reason


@pytest.mark.filterwarnings("ignore:step .* gradients are not finite at the loss scale")
def test_float16_is_followed_to_where_its_gradients_overflow():
    proof = proof_of("log_of_chance", 240, FIELD)
    scale, _ = proof.tune_loss_scale(FLOAT16)
    verdict = proof.prove(replace(FLOAT16, loss_scale=scale))
    assert verdict.verdict == "rejected"
    assert verdict.step > 60


@pytest.fixture(scope="module")
def growing():
    """A proof of the task whose numbers grow, and its recipe at the loss scale found."""
    proof = proof_of("growing_norm")
    scale, _ = proof.tune_loss_scale(FLOAT16)
    return proof, replace(FLOAT16, loss_scale=scale)


def test_an_overflow_to_come_is_seen_in_numbers_that_grow(growing):
    proof, recipe = growing
    verdict = proof.prove(recipe)
    assert verdict.verdict == "drift"
    assert "largest float16 number" in verdict.reason


def test_numbers_that_grow_and_stop_below_the_limit_keep_no_matrix_product_in_float32(growing):
    proof, recipe = growing
    facts = TorchBackend().describe(
        zoo("growing_norm"), device="cpu", seed=0, batch_size=32, report=silent
    )
    found = proof.find_islands(recipe, facts.units)
    assert found.recipe is not None
    assert found.recipe.float32_modules == ("norm",)
    assert found.products == 0.0


def test_code_that_float16_makes_raise_is_rejected_and_repaired_by_an_island():
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
