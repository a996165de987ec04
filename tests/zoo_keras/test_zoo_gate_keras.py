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

from benchmarks.numerics.labels import POLICIES
from tests.zoo_tasks import verdicts

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


def tasks() -> Iterator[tuple[Path, dict[str, str]]]:
    """A third of each folder's tasks, with what long runs show of each policy."""
    for folder in (HERE, HERE / "field"):
        truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))["tasks"]
        for name in sorted(truth)[::3]:
            labels = {policy: truth[name][policy]["label"] for policy in POLICIES}
            yield folder / f"{name}.py", labels


@pytest.fixture
def no_lines() -> Iterator[None]:
    """No log line for every loss that is not finite."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_a_third_of_each_folder_is_judged_and_holds_both_labels() -> None:
    chosen = [truth for _, truth in tasks()]
    assert len(chosen) == 10
    for policy in POLICIES:
        labels = [truth[policy] for truth in chosen]
        assert all(labels.count(label) >= 3 for label in LABELS)


@pytest.mark.parametrize(
    ("path", "truth"), [pytest.param(*task, id=task[0].stem) for task in tasks()]
)
@pytest.mark.usefixtures("no_lines")
def test_what_breaks_is_caught_and_what_is_healthy_is_not_flagged(
    path: Path, truth: dict[str, str]
) -> None:
    keras.utils.clear_session(free_memory=False)
    clear = {policy: label for policy, label in truth.items() if label in LABELS}
    found = verdicts(path, clear, framework="keras", seed=SEED)
    labels = {p: "healthy" if each.verdict == "equal" else "broken" for p, each in found.items()}
    assert labels == clear, {policy: each.reason for policy, each in found.items()}
