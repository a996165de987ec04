"""What breaks in 16 bits is caught from a few steps, and what trains well is not accused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import keras
import pytest

from autoprec.backends.keras.backend import KerasBackend
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.single_step import check_single_steps
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.recipe import LossScale, Recipe
from autoprec.tuning.proof.loss_scale_search import loss_scale_from_backward
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.task_file import load_task
from benchmarks.numerics.truth_keras import truth_of

pytestmark = pytest.mark.zoo

HERE = Path(__file__).parent
FIELD = HERE / "field"
POLICIES = {"bfloat16": Policy.MIXED_BFLOAT16, "float16": Policy.MIXED_FLOAT16}


@cache
def loaded(path):
    """A task; its module is imported once."""
    return load_task(path)


def names(folder):
    return sorted(p.stem for p in folder.glob("*.py") if "\ndef build_model(" in p.read_text())


def measured(folder):
    """What the loops of benchmarks/numerics/loops_keras.py have shown."""
    return json.loads((folder / "truth.json").read_text())["tasks"]


def tracer(path):
    return tracer_of(loaded(path))


def tracer_of(task):
    keras.utils.clear_session(free_memory=False)
    return KerasBackend().tracer(task, device="cpu", seed=0, report=lambda *_: None)


def eager_tracer(path):
    """Of a task whose few steps run without a trace, whose making takes longer than they do."""
    task = loaded(path)

    def build_model():
        model = task.build_model()
        model.run_eagerly = True
        return model

    return tracer_of(replace(task, build_model=build_model))


def tuned(policy, traced):
    recipe = Recipe(policy=POLICIES[policy], batch_size=16)
    if not recipe.policy.needs_loss_scale:
        return recipe
    recipe = replace(recipe, loss_scale=LossScale())
    return replace(recipe, loss_scale=loss_scale_from_backward(recipe, traced))


@pytest.mark.parametrize("folder", [HERE, FIELD])
def test_every_task_has_its_truth_measured(folder):
    assert set(measured(folder)) == set(names(folder))
    assert len(names(folder)) >= 10


@pytest.mark.parametrize("name", names(HERE))
def test_what_the_author_said_is_what_long_runs_show(name):
    loaded(HERE / f"{name}.py")
    found = {POLICIES[each].value: measured(HERE)[name][each]["label"] for each in POLICIES}
    assert found == sys.modules[name].TRUTH


def test_what_was_measured_is_measured_again():
    """In a tenth of the steps float16 breaks this task already, and bfloat16 does not."""
    name = "rms_norm"
    found = truth_of(loaded(HERE / f"{name}.py"), steps=20, seeds=(2, 2))
    for policy in POLICIES:
        assert found[policy]["label"] == measured(HERE)[name][policy]["label"], found[policy]
    assert {found[policy]["label"] for policy in POLICIES} == {"broken", "healthy"}


@pytest.mark.slow
@pytest.mark.parametrize("name", names(HERE))
def test_single_steps_tell_broken_from_healthy(name):
    traced = eager_tracer(HERE / f"{name}.py")
    traced.reference(batch_size=16, steps=9, checkpoints=(0, 2, 8))
    noise = traced.noise(draws=3)
    for policy in POLICIES:
        check = check_single_steps(
            traced.compare_steps(recipe=tuned(policy, traced)), noise, Tolerance()
        )
        label = measured(HERE)[name][policy]["label"]
        assert check.passed is (label == "healthy"), (policy, check)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy", "island"),
    [
        ("float_positions", "bfloat16", "sinusoids"),
        ("rms_norm", "float16", "root_mean_square"),
    ],
)
def test_an_island_repairs_what_one_layer_breaks(name, policy, island):
    traced = eager_tracer(HERE / f"{name}.py")
    traced.reference(batch_size=16, steps=3, checkpoints=(0, 2))
    broken = tuned(policy, traced)
    mended = replace(broken, float32_modules=(island,))
    noise = traced.noise(draws=3)
    assert not check_single_steps(traced.compare_steps(recipe=broken), noise, Tolerance()).passed
    assert check_single_steps(traced.compare_steps(recipe=mended), noise, Tolerance()).passed


@pytest.mark.parametrize(
    ("name", "policy", "told"),
    [
        ("log_of_chance", "float16", "steps were skipped"),
        ("learned_frequencies", "bfloat16", "its loss is"),
        ("slopes_by_differences", "bfloat16", "its loss is"),
        ("house_prices", "bfloat16", "its loss is"),
        ("variance_upcast", "bfloat16", ""),
    ],
)
def test_a_proof_tells_what_breaks_late_from_what_looks_like_it(name, policy, told):
    proof = Proof(tracer(FIELD / f"{name}.py"), steps=120)
    recipe = Recipe(policy=POLICIES[policy], batch_size=32)
    if policy == "float16":
        recipe = replace(recipe, loss_scale=LossScale())
        recipe = replace(recipe, loss_scale=proof.tune_loss_scale(recipe)[0])
    verdict = proof.prove(recipe)
    broken = measured(FIELD)[name][policy]["label"] == "broken"
    assert broken is bool(told)
    assert verdict.accepted is not broken, verdict
    assert told in verdict.reason
