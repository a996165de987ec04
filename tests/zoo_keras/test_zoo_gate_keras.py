"""The confusion table on a third of the Keras zoo, by whole proofs: every third task by its name.

`benchmarks/numerics/zoo.py` prints the table of the whole. What is expected comes from long runs of
loops written by hand (truth.json), never from the judge.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

from autoprec.tuning.proof.recipe_proof import Proof
from benchmarks.numerics.judge import at_tuned_scale, tracer
from benchmarks.numerics.labels import POLICIES
from tests.zoo_tasks import loaded

pytestmark = [
    pytest.mark.keras,
    pytest.mark.slow,
    pytest.mark.zoo,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),  # broken tasks warn, of all sorts of things
]

HERE = Path(__file__).parent
SEED = 1000  # the first of those that the whole table is made of
LABELS = ("broken", "healthy")


def pairs() -> Iterator[tuple[Path, str, str]]:
    """A third of each folder's tasks under each policy, with what long runs show."""
    for folder in (HERE, HERE / "field"):
        truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))["tasks"]
        for name in sorted(truth)[::3]:
            for policy in POLICIES:
                yield folder / f"{name}.py", policy, truth[name][policy]["label"]


@pytest.fixture
def no_lines() -> Iterator[None]:
    """No log line for every loss that is not finite."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_a_third_of_each_folder_is_judged_and_holds_both_labels() -> None:
    chosen = list(pairs())
    assert len(chosen) == 20
    for policy in POLICIES:
        labels = [label for _, own, label in chosen if own == policy]
        assert all(labels.count(label) >= 3 for label in LABELS)


@pytest.mark.parametrize(
    ("path", "policy", "label"),
    [
        pytest.param(*pair, id=f"{pair[0].stem}-{pair[1]}")
        for pair in pairs()
        if pair[2] in LABELS  # of the others long runs leave open what becomes of them
    ],
)
@pytest.mark.usefixtures("no_lines")
def test_what_breaks_is_caught_and_what_is_healthy_is_not_flagged(
    path: Path, policy: str, label: str
) -> None:
    keras.utils.clear_session(free_memory=False)
    proof = Proof(tracer(loaded(path), SEED, framework="keras"))
    verdict = proof.prove(at_tuned_scale(proof, POLICIES[policy]))
    assert ("healthy" if verdict.verdict == "equal" else "broken") == label, verdict.reason
