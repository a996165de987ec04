"""The confusion table on a fixed part of the zoo: what breaks is caught, what is healthy is not.

`tests/zoo/gate.json` lists the part; `benchmarks/numerics/zoo.py` prints the table of the whole.
What is expected comes from long runs (truth.json), never from the judge.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.numerics.labels import POLICIES
from tests.zoo_tasks import verdicts

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.zoo,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),  # broken tasks warn, of all sorts of things
]

ZOO = Path(__file__).parents[2] / "zoo"
FOLDERS = {"zoo": ZOO, "field": ZOO / "field"}
GATE = json.loads((ZOO / "gate.json").read_text(encoding="utf-8"))
SEED = GATE["seed"]

#: What docs/results.md aims at on the whole zoo.
CAUGHT, FLAGGED = 0.97, 0.02


def tasks() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Every task of the part: its zoo, its name, and its truth by policy where that is clear."""
    for zoo, folder in FOLDERS.items():
        truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))["tasks"]
        for task in GATE["tasks"][zoo]:
            labels = {policy: truth[task][policy]["label"] for policy in POLICIES}
            yield zoo, task, {policy: each for policy, each in labels.items() if each != "unclear"}


@pytest.fixture(scope="module")
def table() -> Iterator[list[dict[str, Any]]]:
    """The pairs with their verdicts, in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # a line for every loss that is not finite
    try:
        yield [
            {"task": task, "policy": policy, "truth": truth[policy], "verdict": found.verdict}
            for zoo, task, truth in tasks()
            for policy, found in verdicts(
                FOLDERS[zoo] / f"{task}.py", truth, framework="torch", seed=SEED
            ).items()
        ]
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)


def wrong(table: list[dict[str, Any]], truth: str) -> tuple[list[str], int]:
    """The pairs of this truth that are judged otherwise, and how many pairs there are."""
    own = [row for row in table if row["truth"] == truth]
    missed = [row for row in own if (row["verdict"] == "equal") == (truth == "broken")]
    return [f"{row['task']} in {row['policy']}: {row['verdict']}" for row in missed], len(own)


def test_the_part_holds_a_third_of_the_zoo_and_both_labels() -> None:
    assert sum(len(tasks) for tasks in GATE["tasks"].values()) >= GATE["of"] / 3
    labels = [pair for _, _, truth in tasks() for pair in truth.items()]
    assert all(labels.count((p, t)) >= 20 for p in POLICIES for t in ("broken", "healthy"))


def test_what_breaks_is_caught(table: list[dict[str, Any]]) -> None:
    missed, count = wrong(table, "broken")
    assert len(missed) <= (1 - CAUGHT) * count, missed


def test_what_is_healthy_is_not_flagged(table: list[dict[str, Any]]) -> None:
    flagged, count = wrong(table, "healthy")
    assert len(flagged) <= FLAGGED * count, flagged
