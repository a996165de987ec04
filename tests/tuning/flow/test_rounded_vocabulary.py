"""What a rounded vocabulary would bring is measured where padding was tried and not chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.measurement import Dimension
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Alignment, Recipe
from autoprec.tuning.flow.rounded_vocabulary import (
    RoundedVocabulary,
    measure_rounding,
    vocabulary_to_round,
)
from autoprec.tuning.time_limit import Deadline
from autoprec.workers.failures import FailureKind, WorkerFailure
from tests.tuning.fake_results import TASK

GPT2 = replace(
    TASK,
    dimensions=(
        Dimension("words", "Embedding", "embedding_dim", 768),
        Dimension("words", "Embedding", "num_embeddings", 50257),
        Dimension("body", "Linear", "out_features", 3070),
        Dimension("head", "Linear", "out_features", 50257),
    ),
)
BOTH = (Alignment(), Alignment(8, ("head",)), Alignment(64, ("head", "body")))


@pytest.mark.parametrize(
    ("task", "alignments", "sizes"),
    [
        (GPT2, BOTH, (50257, 50304)),
        (GPT2, BOTH[:2], (50257, 50264)),
        (GPT2, BOTH[:1], (0, 0)),
        (replace(GPT2, dimensions=GPT2.dimensions[:3]), BOTH, (0, 0)),
        (replace(GPT2, dimensions=GPT2.dimensions[2:]), BOTH, (0, 0)),
    ],
)
def test_a_vocabulary_is_what_is_embedded_and_predicted(
    task: Any, alignments: tuple[Alignment, ...], sizes: tuple[int, int]
) -> None:
    assert vocabulary_to_round(task, alignments) == sizes


GAIN = Ratio(1.04, 1.02, 1.06, 5)


class Called:
    """A runner that notes what it is asked, and answers or fails."""

    def __init__(self, answer: Any = GAIN) -> None:
        self.answer, self.calls = answer, list[Any]()

    def call(self, method: str, **arguments: Any) -> Any:
        self.calls.append((method, arguments))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def measured(
    runner: Called,
    recipe: Recipe,
    said: list[Any] | None = None,
    *,
    seconds: float = 1e9,
    **options: Any,
) -> RoundedVocabulary | None:
    job = SimpleNamespace(
        deadline=Deadline(0.0, seconds, lambda: 0.0),
        options=SimpleNamespace(**{"nproc": 1, "seed": 3, **options}),
        listener=(said if said is not None else []).append,
    )
    preflight = SimpleNamespace(task=GPT2, space=SimpleNamespace(alignments=BOTH))
    return measure_rounding(cast(Any, job), cast(Any, preflight), recipe, cast(Any, runner))


def test_the_chosen_recipe_is_timed_without_its_compiler() -> None:
    runner = Called()
    knobs = {"fused_optimizer": True, "compile_scope": "blocks"}
    found = measured(runner, Recipe(batch_size=16, compile=True, knobs=knobs))
    assert found == RoundedVocabulary(50257, 50304, GAIN)
    ((method, arguments),) = runner.calls
    assert (method, arguments["sizes"], arguments["seed"]) == ("rounding_gain", (50257, 50304), 3)
    assert arguments["recipe"] == Recipe(batch_size=16, knobs={"fused_optimizer": True})


@pytest.mark.parametrize(
    ("recipe", "given"),
    [
        (Recipe(alignment=BOTH[1]), {}),
        (Recipe(), {"nproc": 2}),
        (Recipe(), {"seconds": 30.0}),
    ],
    ids=["padding pays", "ranks", "no time"],
)
def test_it_is_not_measured_for_nothing(recipe: Recipe, given: dict[str, Any]) -> None:
    runner = Called()
    assert measured(runner, recipe, **given) is None
    assert runner.calls == []


def test_a_model_that_cannot_be_rounded_is_told_of() -> None:
    said: list[Any] = []
    failure = WorkerFailure(FailureKind.USER_ERROR, "expected 50257 classes")
    assert measured(Called(failure), Recipe(), said) is None
    assert said[-1].text == "a rounded vocabulary was not measured: expected 50257 classes"


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (
            GAIN,
            "vocabulary 50257: 50304 in the model itself would bring 4 % (1.040x (1.020-1.060, "
            "5 rounds)); build it with that",
        ),
        (
            Ratio(1.01, 0.99, 1.03, 5),
            "vocabulary 50257: 50304 in the model itself brings nothing (1.010x (0.990-1.030, "
            "5 rounds))",
        ),
    ],
)
def test_the_advice_has_the_measured_number(gain: Ratio, text: str) -> None:
    assert RoundedVocabulary(50257, 50304, gain).text == text


WORDS = """
import torch
from torch import nn

BATCH_SIZE = 16

def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(301, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 301))

def build_data(batch_size):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        words = torch.randint(301, (batch_size, 9), generator=generator)
        yield words[:, :-1], (words[:, :-1] + 1) % 301

def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
"""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_a_tuning_tells_what_rounding_was_measured_to_bring(tmp_path: Path) -> None:
    from autoprec import tune

    task = tmp_path / "words.py"
    task.write_text(WORDS)
    profile = tune(
        task,
        policies="float32",
        align=64,
        extras=False,
        rounds=1,
        trials=3,
        proof_steps=30,
        storage=tmp_path / "study.journal",
        output=tmp_path / "words.profile.yaml",
    )
    said = [
        text for text in profile.evidence.warnings if "vocabulary 301: 320 in the model" in text
    ]
    padded = bool(profile.recipe.alignment.modules)
    assert len(said) == (not padded)
